"""The controller's part in rollouts: decides what they need, and changes their records."""

import logging
from collections.abc import Callable, Mapping

from gateway.cluster.context import ClusterContext
from gateway.cluster.traffic_sums import TrafficKey
from gateway.core.audit_writer import AuditWriter
from gateway.planning.plan import Plan
from gateway.planning.rollout_monitor import RolloutMonitor
from gateway.planning.rollouts import RolloutAction, next_action, step_ends_at
from registry.errors import Conflict, NotFound, RegistryError
from registry.records.change import CallTraffic
from registry.records.function import Function
from registry.records.rollout import RolloutState
from registry.records.rollout_changes import advance_rollout, end_rollout, run_rollout

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_OPERATIONS = {RolloutState.PROMOTED: "rollout.promote", RolloutState.ROLLED_BACK: "rollout.rollback"}


class RolloutControl:
    """Changes rollouts as their candidates' health demands; changes in progress are not made twice."""

    def __init__(self, cluster: ClusterContext, monitor: RolloutMonitor, audit: AuditWriter) -> None:
        self._state = cluster.state
        self._state_cache = cluster.state_cache
        self._clock = cluster.clock
        self._monitor = monitor
        self._audit = audit
        self._changing: set[str] = set()  # functions
        self._retry_at_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RolloutControl {self._monitor!r} changing={sorted(self._changing)}>"

    def note(self, own: Callable[[], Mapping[TrafficKey, CallTraffic]]) -> None:
        """Take in the counts of now; every gateway does, so that each can show them, and lead."""
        counts = own() if self._state_cache.rollouts else {}
        reports = self._state_cache.load_reports()
        self._monitor.update(self._state_cache, counts, reports, self._clock.monotonic_s())

    def plan(self, plan: Plan) -> None:
        """Add the changes that rollouts need now."""
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        for function, rollout in self._state_cache.rollouts.items():
            if function in self._changing:
                continue
            if now_s < (retry_s := self._retry_at_s.get(function, 0.0)):
                plan.replan_at(retry_s)
                continue
            health = self._monitor.health(self._state_cache, function, rollout)
            action = next_action(function, rollout, health, wall_s)
            if action is not None:
                self._changing.add(function)
                plan.actions.append(action)
            elif (at_s := step_ends_at(rollout)) is not None and at_s > wall_s:
                plan.replan_at(now_s + at_s - wall_s)

    async def change(self, action: RolloutAction) -> None:
        """Change the record; the audit log has what ends a rollout."""
        function, at = action.key.function, self._clock.wall_s()
        shown = action.state.value if action.percent is None else f"at {action.percent:g} %"
        log.info("rollout of %s: %s%s", action.key, shown, f": {action.reason}" if action.reason else "")
        try:
            head = await self._audited(action, at)
            version = await self._state.version(function, head.current)
        except (Conflict, NotFound) as error:  # an operator was faster
            log.info("rollout of %s not changed: %s", action.key, error)
        except RegistryError as error:
            log.warning("rollout of %s not changed, will retry: %s", action.key, error)
            self._retry_at_s[function] = self._clock.monotonic_s() + _RETRY_S
        else:
            self._retry_at_s.pop(function, None)
            self._state_cache.put_function(head, version)
        finally:
            self._changing.discard(function)

    async def _audited(self, action: RolloutAction, at: float) -> Function:
        operation = _OPERATIONS.get(action.state)

        def step(head: Function) -> Function:
            if operation is not None:
                return end_rollout(head, action.id, action.state, action.reason, at=at)
            if action.percent is not None:
                return advance_rollout(head, action.id, action.percent, at=at)
            return run_rollout(head, action.id, at=at)

        if operation is None:
            return await self._state.change_rollout(action.key.function, step)
        entry = await self._audit.begin_own(operation, str(action.key))
        try:
            head = await self._state.change_rollout(action.key.function, step)
        except RegistryError as error:
            status = 409 if isinstance(error, Conflict) else 404 if isinstance(error, NotFound) else 503
            await self._audit.end(entry, status)
            raise
        await self._audit.end(entry, 200)
        return head
