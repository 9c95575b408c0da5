"""The scaling decisions of a run, and how soon after a change of load they came."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.harness.feed_monitor import StateMonitor
from benchmarks.harness.percentile import percentile
from benchmarks.trace.client import StreamedAnswer, TraceSent
from registry.records.scaling import ScalingRecord
from registry.redis.state import RedisState

DecisionRow = tuple[float, int, int, str]  # (time, place of the function, instances, reason)

SETTLED_S = 60.0  # a run begins with as many instances as functions keep
_PERIOD_S = 0.03  # for two functions; readings cost processor time


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDecision:
    """A decision on the function at `place`, made `at_s` on the monotonic clock."""

    at_s: float
    place: int
    record: ScalingRecord


class DecisionMonitor(StateMonitor):
    """Reads the latest decisions again and again; of several between two readings it has the last."""

    def __init__(self, redis_url: str, functions: Sequence[str]) -> None:
        super().__init__(redis_url)
        self._functions = functions
        self.seen: list[SeenDecision] = []

    async def follow(self, state: RedisState) -> None:
        """Take each function's decision once it differs from the one before."""
        latest: dict[int, ScalingRecord] = {}
        while True:
            for place, name in enumerate(self._functions):
                record = await state.scaling_record(name)
                if record is not None and latest.get(place) != record:
                    latest[place] = record
                    at_s = record.at - time.time() + time.monotonic()
                    self.seen.append(SeenDecision(at_s=at_s, place=place, record=record))
            self.following()
            await asyncio.sleep(_PERIOD_S * max(1.0, len(self._functions) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCalls:
    """When a function's requests were due and were answered, each ascending, in seconds of the window."""

    due_s: Sequence[float]
    ended_s: Sequence[float]

    @classmethod
    def of(cls, answers: Sequence[StreamedAnswer], place: int) -> "FunctionCalls":
        own = [one for one in answers if one.function == place]
        return cls(due_s=sorted(one.due_s for one in own), ended_s=sorted(one.last_s for one in own))

    def newest_counted_s(self, at_s: float, calls: int) -> float | None:
        """Return when the newest request was due that a decision at `at_s` for so many open calls counted.

        Later ones, with which more calls were open, came too late for it.
        """
        for place in range(bisect_right(self.due_s, at_s) - 1, -1, -1):
            due_s = self.due_s[place]
            if place + 1 - bisect_right(self.ended_s, due_s) <= calls:
                return due_s
        return None


def decision_figures(seen: Sequence[SeenDecision], sent: TraceSent, slower: int) -> dict[str, Any]:
    """Return the window's decisions in model time, with latencies in the machine's, as the platform's are.

    `decision_ms` is how old the newest counted request was when more instances were decided on. It leaves out
    decisions that no request caused but the growth of sequences, slow starts or a trend: those whose newest
    request had arrived before the function's previous decision. `lowered_after_s` is how long after that
    one fewer were decided on. `turns` is how often changes of the number, from `SETTLED_S` on, were in the
    other direction than the change before, of the same function.
    """
    places = {one.place for one in seen}
    calls = {place: FunctionCalls.of(sent.answers, place) for place in places}
    before: dict[int, SeenDecision] = {}
    raised, lowered, rows = list[float](), list[float](), list[DecisionRow]()
    for one in seen:
        earlier, before[one.place] = before.get(one.place), one
        at_s = one.at_s - sent.started_s
        if not 0 <= at_s <= sent.ended_s:
            continue
        record = one.record
        rows.append((round(at_s / slower, 3), one.place, record.desired, record.reason))
        if earlier is None or record.desired > earlier.record.desired:
            open_calls = record.inputs.in_flight + record.inputs.held
            counted_s = calls[one.place].newest_counted_s(at_s, open_calls)
            if counted_s is not None and (earlier is None or earlier.at_s < sent.started_s + counted_s):
                raised.append(1e3 * (at_s - counted_s))
        elif record.desired < earlier.record.desired:
            lowered.append(one.at_s - earlier.at_s)
    return {
        "decisions": rows,
        "decision_ms": _spread(raised),
        "lowered_after_s": _spread(lowered),
        "turns": sum(_turns(rows, place) for place in places),
    }


def _turns(rows: Sequence[DecisionRow], place: int) -> int:
    """Return how often a function's number was changed in the other direction than before, once settled."""
    counts = [desired for at_s, of, desired, _ in rows if of == place and at_s >= SETTLED_S]
    rises = [after > before for before, after in pairwise(counts) if after != before]
    return sum(before != after for before, after in pairwise(rises))


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    shares = {f"p{share}": percentile(values, share) for share in (50, 90)}
    ends = {"least": min(values, default=None), "most": max(values, default=None)}
    return {
        "count": len(values),
        **{key: None if found is None else round(found, 3) for key, found in {**shares, **ends}.items()},
    }
