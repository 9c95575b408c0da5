"""Waiting calls that no start can serve, and why they are rejected."""

from gateway.cluster.state_cache import ClusterStateCache
from gateway.core.contract import DispatchError
from gateway.dispatch.admission import Admission, RequestQueue
from gateway.dispatch.demand import DemandPublisher
from gateway.planning.placement import unschedulable_reason
from registry.clock import Clock

# How long calls wait while the shared state is unreachable, so that no start can be made.
_CUT_OFF_S = 3.0


class UnservableCalls:
    """Rejects waiting calls that no start can serve; `max_starts` consecutive failed starts are enough."""

    def __init__(
        self,
        admission: Admission,
        state_cache: ClusterStateCache,
        demand: DemandPublisher,
        clock: Clock,
        max_starts: int,
    ) -> None:
        self._admission = admission
        self._state_cache = state_cache
        self._demand = demand
        self._clock = clock
        self._max_starts = max_starts

    def __repr__(self) -> str:
        return f"<UnservableCalls of {self._admission!r}>"

    def reject(self, queue: RequestQueue) -> None:
        """Reject calls whose function was deleted, fits no node, or failed to start too often."""
        key, state_cache = queue.key, self._state_cache
        version = state_cache.version(key)
        deleted = bool(state_cache.cursor) and key.function not in state_cache.functions
        nodes = [entry.record for entry in state_cache.nodes()]
        why = "" if version is None else unschedulable_reason(version, nodes)
        coming = bool(state_cache.starting(key))
        unavailable = self._unavailable()
        if unavailable is not None:
            for queued in queue.calls():
                self._admission.reject(queued, unavailable)
            return
        if not (deleted or why or (state_cache.backoff.failures(key) and not coming)):
            return  # the usual case, with possibly thousands of queued calls
        usable = {node.id for node in state_cache.usable_nodes()}
        for queued in queue.calls():
            if deleted:
                error = DispatchError(
                    "model_not_found", f"the function {key.function} was deleted", status=404
                )
                self._admission.reject(queued, error)
                continue
            failures = state_cache.backoff.failures(key, queued.failure_serial)
            tried = {failure.node for failure in failures}
            spent = len(failures) >= self._max_starts or bool(failures and usable and usable <= tried)
            if why or (spent and not coming):
                reason = why or failures[-1].error
                self._admission.reject(
                    queued,
                    DispatchError(
                        "start_failed",
                        f"{key.function} could not be started: {reason}",
                        status=503,
                        retry_after_s=5,
                    ),
                )

    def _unavailable(self) -> DispatchError | None:
        """Return the error of waiting calls while Redis is unreachable, or accepts no writes (disk full)."""
        lost_s, demand = self._state_cache.disconnected_s, self._demand
        if demand.failing_s > _CUT_OFF_S:
            reason = demand.failure
        elif lost_s is not None and self._clock.monotonic_s() - lost_s > _CUT_OFF_S:
            reason = demand.failure if demand.failing_s else "no connection"
        else:
            return None
        return DispatchError(
            "state_unavailable",
            f"Redis is unavailable ({reason}): no instance can be started",
            status=503,
            retry_after_s=1,
        )
