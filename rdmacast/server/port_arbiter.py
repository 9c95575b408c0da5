"""The order in which payloads leave a node's port: one at a time, so that each arrives as early as it can."""

import asyncio
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rdmacast.plan_slot import MAX_STEPS, PlanSlot

_SAMPLES = 16  # the latest payloads, which show the port's rate
_MAX_HOLD_FACTOR = 2.0  # times the expected duration, after which the next payload may start
_MIN_HOLD_S = 0.05
_MAX_HOLD_S = 10.0  # for any payload and any rate
_MIN_BYTES_PER_S = 8e6  # bounds the first holds of an unknown port: a limit, no estimate
_MAX_PLANS = 64
_MAX_MISSES = 3  # a plan with this many skipped slots is not waited for any more


@dataclass(slots=True, order=True)
class _QueuedPayload:
    """A payload that waits for the port; one without a slot precedes those with one."""

    step: int
    rank: int
    sequence: int
    nbytes: int = field(compare=False)
    slot: PlanSlot | None = field(compare=False)
    granted: "asyncio.Future[None]" = field(compare=False)


@dataclass(slots=True)
class _Plan:
    """The progress of a cast's plan at this port: all slots before `step` were granted or skipped."""

    step: int = 0
    misses: int = 0
    advanced_s: float = 0.0  # by the loop's clock

    @property
    def is_over(self) -> bool:
        return self.step >= MAX_STEPS

    def skip_to(self, slot: PlanSlot) -> None:
        """Skip the slots before this one: their payloads were not requested in time."""
        self.misses += 1
        self.step = MAX_STEPS if self.misses >= _MAX_MISSES else max(self.step, slot.after)


@dataclass(slots=True, eq=False)
class PortGrant:
    """A grant of the port, as a context manager; a class, for every payload enters one.

    It has the port from `started_s` on, alone for at most `max_hold_s`.
    """

    arbiter: "PortArbiter"
    nbytes: int
    rank: int
    slot: PlanSlot | None
    max_hold_s: float = 0.0
    started_s: float = 0.0

    async def __aenter__(self) -> None:
        await self.arbiter.acquire(self)

    async def __aexit__(self, *_: object) -> None:
        self.arbiter.release(self)


class PortArbiter:
    """An arbiter of one port: payloads that shared it would all end late.

    A payload that its receiver takes slowly leaves the port to the next one. The lowest rank comes first,
    of equals the earliest request. Payloads with a slot leave in the order of the plan's steps: for earlier
    slots the port waits at most as long as a payload may hold it.
    """

    def __init__(self) -> None:
        self._queue: list[_QueuedPayload] = []  # in order
        self._sequence = 0
        self._holder: object | None = None
        self._timer: asyncio.TimerHandle | None = None  # while the port is held
        self._grace: asyncio.TimerHandle | None = None  # while the port is free although payloads wait
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # seconds, bytes
        self._plans: OrderedDict[int, _Plan] = OrderedDict()  # by mark

    def __repr__(self) -> str:
        return f"PortArbiter({'taken' if self._holder is not None else 'free'}, {len(self._queue)} waiting)"

    def grant(self, nbytes: int, rank: int = 0, slot: PlanSlot | None = None) -> "PortGrant":
        """Return a context manager that holds the port, alone unless the payload before takes too long."""
        return PortGrant(self, nbytes, rank, slot)

    async def acquire(self, grant: "PortGrant") -> None:
        loop, slot = asyncio.get_running_loop(), grant.slot
        if self._holder is not None or not self._is_due(slot):
            await self._wait_for_grant(grant.nbytes, grant.rank, slot)
        self._holder = grant
        self._on_started(slot)
        grant.max_hold_s = self._max_hold_s(grant.nbytes)
        self._timer = loop.call_later(grant.max_hold_s, self._grant_next)
        grant.started_s = loop.time()

    def release(self, grant: "PortGrant") -> None:
        took_s = asyncio.get_running_loop().time() - grant.started_s
        self._samples.append((min(grant.max_hold_s, took_s), grant.nbytes))
        if self._holder is grant:
            self._grant_next()

    async def _wait_for_grant(self, nbytes: int, rank: int, slot: PlanSlot | None) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        step = -1 if slot is None or self._plan_of(slot).is_over else slot.step
        queued = _QueuedPayload(step, rank, self._sequence, nbytes, slot, granted)
        insort(self._queue, queued)
        if self._holder is None:
            self._start_grace()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._queue.remove(queued)
            else:  # it was granted meanwhile
                self._grant_next()
            raise

    def _is_due(self, slot: PlanSlot | None) -> bool:
        """Return whether all earlier slots of the plan were granted."""
        return slot is None or slot.after <= self._plan_of(slot).step

    def _plan_of(self, slot: PlanSlot) -> _Plan:
        if slot.mark not in self._plans:
            self._plans[slot.mark] = _Plan(advanced_s=asyncio.get_running_loop().time())
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return self._plans[slot.mark]

    def _on_started(self, slot: PlanSlot | None) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if slot is not None:
            plan = self._plan_of(slot)
            plan.step = max(plan.step, slot.step + 1)
            plan.advanced_s = asyncio.get_running_loop().time()

    def _max_hold_s(self, nbytes: int) -> float:
        """Return after how many seconds the next payload may start."""
        # Short payloads say little: buffers on the path take them at once.
        took_s, took_bytes = 0.0, 0
        for seconds, moved in self._samples:
            if 2 * moved >= nbytes:
                took_s, took_bytes = took_s + seconds, took_bytes + moved
        if not took_bytes:
            return min(_MAX_HOLD_S, _MAX_HOLD_FACTOR * nbytes / _MIN_BYTES_PER_S)
        return min(_MAX_HOLD_S, max(_MIN_HOLD_S, _MAX_HOLD_FACTOR * took_s / took_bytes * nbytes))

    def _grant_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._holder = None
        queued = next((queued for queued in self._queued() if self._is_due(queued.slot)), None)
        if queued is None:
            self._start_grace()
        else:
            self._grant((self._overdue() if queued.step < 0 else None) or queued)

    def _queued(self) -> Iterator[_QueuedPayload]:
        return (queued for queued in self._queue if not queued.granted.done())

    def _overdue(self) -> _QueuedPayload | None:
        """Return a payload whose plan makes no progress while others without a slot overtake it."""
        queued = next((queued for queued in self._queued() if queued.step >= 0), None)
        if queued is None or queued.slot is None:
            return None
        plan = self._plan_of(queued.slot)
        if asyncio.get_running_loop().time() < plan.advanced_s + 2 * self._max_hold_s(queued.nbytes):
            return None
        if not self._is_due(queued.slot):
            self._skip(plan, queued.slot)
        return queued

    def _grant(self, queued: _QueuedPayload) -> None:
        self._queue.remove(queued)
        self._holder = queued.granted
        queued.granted.set_result(None)

    def _start_grace(self) -> None:
        """Wait for the slots before the first queued one."""
        if self._queue and self._grace is None:
            nbytes = self._queue[0].nbytes
            self._grace = asyncio.get_running_loop().call_later(self._max_hold_s(nbytes), self._on_grace_over)

    def _on_grace_over(self) -> None:
        """Stop waiting: the earlier payloads were not requested, and their readers may be gone."""
        self._grace = None
        if self._holder is not None:
            return
        first = next(self._queued(), None)
        if first is None:
            return
        if first.slot is not None:
            self._skip(self._plan_of(first.slot), first.slot)
        self._grant(first)

    def _skip(self, plan: _Plan, slot: PlanSlot) -> None:
        """Skip the plan's earlier slots; once its plan is over, payloads are queued as without a slot."""
        plan.skip_to(slot)
        if plan.is_over:
            for queued in self._queue:
                if queued.slot is not None and queued.slot.mark == slot.mark:
                    queued.step = -1
            self._queue.sort()
