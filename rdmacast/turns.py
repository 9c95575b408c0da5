"""Whose payload leaves a node's port next: one at a time, so that each arrives as early as it can."""

import asyncio
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from rdmacast.due import MOST_STEPS, Due

_SAMPLES = 16  # the latest turns, which tell what the port can do
_LONG = 2.0  # a turn that takes more than so many times that long lets the next begin
_LEAST_S = 0.05
_MOST_S = 10.0  # whatever was asked for, and however long it took before
_FIRST_BYTES_S = 8e6  # what a port is taken for while nothing is known of it
_MOST_PLANS = 64
_MISSES = 3  # a plan by which nothing came so often is not waited for any more


@dataclass(slots=True, order=True)
class _Waiting:
    """Who waits for a turn; what is due in none goes first."""

    step: int
    rank: int
    asked: int
    nbytes: int = field(compare=False)
    due: Due | None = field(compare=False)
    granted: "asyncio.Future[None]" = field(compare=False)


@dataclass(slots=True)
class _Plan:
    """How far a cast's plan is here: all that is due before `step` has begun, or is not waited for."""

    step: int = 0
    misses: int = 0
    moved_s: float = 0.0  # when it came so far, by the loop's clock

    @property
    def is_over(self) -> bool:
        return self.step >= MOST_STEPS

    def give_way(self, due: Due) -> None:
        """What was due before does not come."""
        self.misses += 1
        self.step = MOST_STEPS if self.misses >= _MISSES else max(self.step, due.after)


@dataclass(slots=True, eq=False)
class Turn:
    """A context manager; a class, for every payload enters one. From `began_s` on it has `long_s` at most."""

    turns: "Turns"
    nbytes: int
    rank: int
    due: Due | None
    long_s: float = 0.0
    began_s: float = 0.0

    async def __aenter__(self) -> None:
        await self.turns.take(self)

    async def __aexit__(self, *_: object) -> None:
        self.turns.give_back(self)


class Turns:
    """Several payloads that share a port end all late, those that wait for their turn one by one; but one
    that its receiver takes slowly leaves the port free for the next. The lowest rank comes first, of equals
    who asked first. What is due by a plan comes in the order of its steps: the port waits, for as long as
    a turn may take, for what is due before."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []  # in order
        self._asked = 0
        self._holder: object | None = None
        self._timer: asyncio.TimerHandle | None = None  # while somebody has the port
        self._grace: asyncio.TimerHandle | None = None  # while nobody has it though some wait
        self._ended: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # seconds, bytes
        self._plans: OrderedDict[int, _Plan] = OrderedDict()  # by mark

    def __repr__(self) -> str:
        return f"Turns({'taken' if self._holder is not None else 'free'}, {len(self._waiting)} waiting)"

    def turn(self, nbytes: int, rank: int = 0, due: Due | None = None) -> "Turn":
        """Inside, the port is ours, or whoever had it takes too long."""
        return Turn(self, nbytes, rank, due)

    async def take(self, turn: "Turn") -> None:
        loop, due = asyncio.get_running_loop(), turn.due
        if self._holder is not None or not self._is_next(due):
            await self._granted(turn.nbytes, turn.rank, due)
        self._holder = turn
        self._begun(due)
        turn.long_s = self._long_s(turn.nbytes)
        self._timer = loop.call_later(turn.long_s, self._next)
        turn.began_s = loop.time()

    def give_back(self, turn: "Turn") -> None:
        took_s = asyncio.get_running_loop().time() - turn.began_s
        self._ended.append((min(turn.long_s, took_s), turn.nbytes))
        if self._holder is turn:
            self._next()

    async def _granted(self, nbytes: int, rank: int, due: Due | None) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked += 1
        step = -1 if due is None or self._plan(due).is_over else due.step
        one = _Waiting(step, rank, self._asked, nbytes, due, granted)
        insort(self._waiting, one)
        if self._holder is None:
            self._hold()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.remove(one)
            else:  # it was granted meanwhile
                self._next()
            raise

    def _is_next(self, due: Due | None) -> bool:
        """Whether all that is due before has begun."""
        return due is None or due.after <= self._plan(due).step

    def _plan(self, due: Due) -> _Plan:
        if due.mark not in self._plans:
            self._plans[due.mark] = _Plan(moved_s=asyncio.get_running_loop().time())
            if len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        return self._plans[due.mark]

    def _begun(self, due: Due | None) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if due is not None:
            plan = self._plan(due)
            plan.step = max(plan.step, due.step + 1)
            plan.moved_s = asyncio.get_running_loop().time()

    def _long_s(self, nbytes: int) -> float:
        """After so long the next may begin."""
        # Short ones tell little: buffers on the way take them at once.
        took_s, took_bytes = 0.0, 0
        for seconds, moved in self._ended:
            if 2 * moved >= nbytes:
                took_s, took_bytes = took_s + seconds, took_bytes + moved
        if not took_bytes:
            return min(_MOST_S, _LONG * nbytes / _FIRST_BYTES_S)
        return min(_MOST_S, max(_LEAST_S, _LONG * took_s / took_bytes * nbytes))

    def _next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._holder = None
        one = next((one for one in self._asking() if self._is_next(one.due)), None)
        if one is None:
            self._hold()
        else:
            self._grant((self._overdue() if one.step < 0 else None) or one)

    def _asking(self) -> Iterator[_Waiting]:
        return (one for one in self._waiting if not one.granted.done())

    def _overdue(self) -> _Waiting | None:
        """What waits by its plan though that goes on no more, while what is due in none overtakes it."""
        one = next((one for one in self._asking() if one.step >= 0), None)
        if one is None or one.due is None:
            return None
        plan = self._plan(one.due)
        if asyncio.get_running_loop().time() < plan.moved_s + 2 * self._long_s(one.nbytes):
            return None
        if not self._is_next(one.due):
            self._give_up(plan, one.due)
        return one

    def _grant(self, one: _Waiting) -> None:
        self._waiting.remove(one)
        self._holder = one.granted
        one.granted.set_result(None)

    def _hold(self) -> None:
        """Wait for what is due before all that waits."""
        if self._waiting and self._grace is None:
            nbytes = self._waiting[0].nbytes
            self._grace = asyncio.get_running_loop().call_later(self._long_s(nbytes), self._give_way)

    def _give_way(self) -> None:
        """It does not come: whoever it was for may be gone."""
        self._grace = None
        if self._holder is not None:
            return
        first = next(self._asking(), None)
        if first is None:
            return
        if first.due is not None:
            self._give_up(self._plan(first.due), first.due)
        self._grant(first)

    def _give_up(self, plan: _Plan, due: Due) -> None:
        """Wait no more for what is due before; of a plan that is over all are as if they were due in none."""
        plan.give_way(due)
        if plan.is_over:
            for one in self._waiting:
                if one.due is not None and one.due.mark == due.mark:
                    one.step = -1
            self._waiting.sort()
