"""Admission control: a bounded request queue per function version, fair between tenants.

Synchronous; only a call that waits has an asyncio future.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.cluster.replicas import Replica
from gateway.cluster.state_cache import VersionKey
from gateway.core.contract import DispatchError, FunctionCall, WaitStage
from gateway.dispatch.fairness import TenantCounts, WeightedFairQueue
from registry.messages.node import Compute, Generate
from registry.records.function import FunctionTask

_AVERAGE_WEIGHT = 0.2  # of the latest call in the moving average of service times
_MAX_AVERAGES = 4096  # versions


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Bounds on queued calls per function version and in total, and the `Retry-After` of a rejection.

    At a bound, a call of a tenant with fewer queued calls replaces the newest call of the tenant with most.
    """

    held_per_function: int = 2000
    held: int = 8000
    retry_after_s: int = 2


class QueuedRequest:
    """One call: queued, on a replica, or rejected. Each change of that is passed to `wake`."""

    __slots__ = (
        "_waiter",
        "arrival",
        "arrived_s",
        "assigned_s",
        "batches",
        "cost",
        "error",
        "failure_serial",
        "goes_to",
        "has_token",
        "hot",
        "instance",
        "key",
        "ready_s",
        "tenant",
    )

    def __init__(
        self, call: FunctionCall, key: VersionKey, arrived_s: float, failure_serial: int, *, hot: bool
    ) -> None:
        self.key = key
        self.tenant = call.tenant
        self.cost = _cost(call)
        self.batches = call.version.task is not FunctionTask.HANDLER  # a batch can always grow by one
        self.arrival = 0  # its sequence number among all calls, once admitted
        self.arrived_s = arrived_s
        self.failure_serial = failure_serial  # only start failures after this one count for this call
        self.hot = hot  # a ready instance existed on arrival
        self.ready_s: float | None = arrived_s if hot else None  # when the first ready one was seen
        self.instance: Replica | None = None
        self.assigned_s = arrived_s  # when it got `instance`
        self.has_token = False  # `instance` has produced a token
        self.goes_to = ""  # the instance that takes the call over from a pipeline; "" for any
        self.error: DispatchError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """End the present `changed`, if any."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def changed(self) -> None:
        """Return at the next `wake`; for one task at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def lost_instance(self) -> None:
        """Record that the instance is lost; a call without another one waits for a start."""
        if self.instance is None:
            self.hot, self.ready_s = False, None

    def __repr__(self) -> str:
        at = self.instance.instance_id if self.instance else "held"
        return f"<QueuedRequest {self.key} of {self.tenant} {self.error or at}>"


class RequestQueue:
    """The calls of one function version: `held` wait, fairly by tenant; the others are on replicas."""

    def __init__(self, key: VersionKey) -> None:
        self.key = key
        self.held: WeightedFairQueue[QueuedRequest] = WeightedFairQueue()
        self.moving: dict[int, QueuedRequest] = {}  # of `held`: bound for one instance, by arrival
        self.tenants = TenantCounts()  # of `held`
        self.unready = False  # some of `held` have found no ready instance yet
        self.stage: WaitStage | None = None  # last reported to `held`

    def __repr__(self) -> str:
        return f"<RequestQueue {self.key} held={len(self.held)} in_flight={self.in_flight}>"

    @property
    def in_flight(self) -> int:
        return self.held.active


class Admission:
    """All request queues under common limits. Every admitted request must be passed to `leave`."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._queues: dict[VersionKey, RequestQueue] = {}
        self._tenants = TenantCounts()  # of all that are held
        self._arrivals = 0
        self._service_s: dict[VersionKey, float] = {}  # moving averages, the oldest first
        self.draining = False

    def __repr__(self) -> str:
        return f"<Admission queues={len(self._queues)} held={self.held} draining={self.draining}>"

    @property
    def held(self) -> int:
        return self._tenants.total

    @property
    def calls(self) -> int:
        return self.held + sum(queue.in_flight for queue in self._queues.values())

    def queues(self) -> Iterator[RequestQueue]:
        return iter(list(self._queues.values()))

    def find(self, key: VersionKey) -> RequestQueue | None:
        return self._queues.get(key)

    def queue(self, key: VersionKey) -> RequestQueue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = RequestQueue(key)
        return queue

    def service_s(self, key: VersionKey) -> float | None:
        """Return the moving average of a call's time on an instance; None before the first call."""
        return self._service_s.get(key)

    def record_service(self, key: VersionKey, seconds: float) -> None:
        """Add the time that a call took on an instance."""
        known = self._service_s.get(key, seconds)
        self._service_s[key] = known + _AVERAGE_WEIGHT * (seconds - known)
        if len(self._service_s) > _MAX_AVERAGES:
            del self._service_s[next(iter(self._service_s))]

    def check_open(self) -> None:
        """Raise DispatchError while this gateway drains."""
        if self.draining:
            raise DispatchError(
                "draining",
                "this gateway is shutting down",
                status=503,
                retry_after_s=self._limits.retry_after_s,
            )

    def enqueue(self, queued: QueuedRequest) -> RequestQueue:
        """Add a new call to its queue. Raises DispatchError if that is full and no other call is evicted."""
        queue = self.queue(queued.key)
        limits = self._limits
        if len(queue.held) >= limits.held_per_function:
            self._evict_for(queued, queue.tenants, (queue,))
            queue = self.queue(queued.key)
        elif self._tenants.total >= limits.held:
            self._evict_for(queued, self._tenants, self.queues())
            queue = self.queue(queued.key)
        queue.unready = queue.unready or queued.ready_s is None
        self._arrivals += 1
        queued.arrival = self._arrivals
        queue.held.add(queued)
        self._count(queue, queued)
        return queue

    def start(self, queued: QueuedRequest, instance: Replica) -> None:
        """Add a new call that goes to a replica at once; nothing of its version may wait."""
        self._arrivals += 1
        queued.arrival = self._arrivals
        self.queue(queued.key).held.serve(queued)
        queued.instance = instance

    def requeue(self, queued: QueuedRequest) -> None:
        """Take a call off its replica and queue it again in order of arrival.

        It is never rejected for lack of room.
        """
        queue = self.queue(queued.key)
        queue.unready = queue.unready or queued.ready_s is None
        queue.held.requeue(queued)
        if queued.goes_to:
            queue.moving[queued.arrival] = queued
        self._count(queue, queued)
        queued.instance = None

    def assign(self, queued: QueuedRequest, instance: Replica) -> None:
        """Move a queued call to a replica."""
        queue = self._queues[queued.key]
        queue.held.start(queued)
        self._discount(queue, queued)
        queued.goes_to = ""
        queued.instance, queued.has_token = instance, False
        queued.wake()

    def reject(self, queued: QueuedRequest, error: DispatchError) -> None:
        """Reject a queued call."""
        self._dequeue(queued)
        queued.error = error
        queued.wake()

    def leave(self, queued: QueuedRequest) -> RequestQueue | None:
        """Remove a call, queued or on a replica; return its queue unless that is empty now. Idempotent."""
        if queued.instance is None:
            self._dequeue(queued)
            return self._queues.get(queued.key)
        queue = self._queues[queued.key]
        held = queue.held
        held.finish(queued.tenant)
        queued.instance = None
        if held.active or held:
            return queue
        del self._queues[queued.key]
        return None

    def _evict_for(
        self, queued: QueuedRequest, tenants: TenantCounts, queues: Iterable[RequestQueue]
    ) -> None:
        """Reject the newest call of the tenant with most queued calls.

        Raises DispatchError if the tenant of `queued` has nearly as many itself.
        """
        largest = tenants.largest
        if largest is not None and tenants[queued.tenant] + 1 < tenants.most:
            fullest = max(queues, key=lambda queue: queue.tenants[largest])
            newest = fullest.held.newest(largest)
            if newest is not None:
                self.reject(newest, self._overloaded(newest.key))
                return
        error = self._overloaded(queued.key)
        self._tidy(queued.key)
        raise error

    def _overloaded(self, key: VersionKey) -> DispatchError:
        queue = self._queues.get(key)
        return DispatchError(
            "overloaded",
            f"{len(queue.held) if queue else 0} calls are queued for {key.function}, {self.held} in total",
            status=503,
            retry_after_s=self._limits.retry_after_s,
        )

    def _dequeue(self, queued: QueuedRequest) -> None:
        queue = self._queues.get(queued.key)
        if queue is not None and queue.held.remove(queued):
            self._discount(queue, queued)
            self._tidy(queued.key)

    def _count(self, queue: RequestQueue, queued: QueuedRequest) -> None:
        queue.tenants.add(queued.tenant)
        self._tenants.add(queued.tenant)

    def _discount(self, queue: RequestQueue, queued: QueuedRequest) -> None:
        queue.moving.pop(queued.arrival, None)
        queue.tenants.drop(queued.tenant)
        self._tenants.drop(queued.tenant)

    def _tidy(self, key: VersionKey) -> None:
        queue = self._queues.get(key)
        if queue is not None and not queue.held and not queue.in_flight:
            del self._queues[key]


def _cost(call: FunctionCall) -> int:
    """Return the estimated cost of a call, in tokens."""
    match call.work:
        case Generate(prompt_ids=prompt, sampling=sampling):
            return len(prompt) + sampling.max_tokens
        case Compute(token_ids=texts):
            return 1 + sum(map(len, texts))
        case _:
            return 1
