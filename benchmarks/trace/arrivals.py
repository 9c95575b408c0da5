"""The part of a trace that is sent (pure).

A trace has two halves: what is tuned on the first is reported on the second.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.traces import TraceRequest

HALVES = ("whole", "first", "second")
BURST = "burst"  # instead of a start: where the trace is burstiest
_BIN_S = 5.0
_STEP_S = 15.0


def part_of(
    trace: Sequence[TraceRequest], half: str, start: float | str, length_s: float
) -> tuple[float, list[TraceRequest]]:
    """Return where the part begins in the trace, and its requests, timed from there.

    `start` is in seconds of the half. Raises ValueError if the half ends before the part does.
    """
    begin_s, end_s = bounds(trace, half)
    if isinstance(start, str):
        start = _burstiest(trace, begin_s, end_s, length_s) - begin_s
    from_s, to_s = begin_s + start, begin_s + start + length_s
    if to_s > end_s + _BIN_S:
        raise ValueError(f"the {half} trace has {end_s - begin_s:.0f} s, not {start:g} + {length_s:g}")
    part = _between(trace, from_s, to_s)
    if not part:
        raise ValueError(f"no requests between {from_s:g} and {to_s:g} s of the trace")
    return from_s, [replace(one, offset_s=one.offset_s - from_s) for one in part]


def bounds(trace: Sequence[TraceRequest], half: str) -> tuple[float, float]:
    """Return the seconds between which a half lies."""
    end_s = trace[-1].offset_s
    return {"whole": (0.0, end_s), "first": (0.0, end_s / 2), "second": (end_s / 2, end_s)}[half]


def burstiness(offsets_s: Sequence[float], length_s: float) -> float:
    """Return the squared coefficient of variation of arrivals per five seconds."""
    bins = Counter(int(at_s / _BIN_S) for at_s in offsets_s)
    count = max(1, round(length_s / _BIN_S))
    mean = sum(bins.values()) / count
    square = sum(bins[index] ** 2 for index in range(count)) / count
    return square / mean**2 - 1 if mean else 0.0


def spread(trace: Sequence[TraceRequest], functions: int, seed: int) -> list[TraceRequest]:
    """Return the requests, each to one of the functions, of which the n-th has 1/n of the first one's."""
    draw = random.Random(seed)
    shares = [1 / (rank + 1) for rank in range(functions)]
    chosen = draw.choices(range(functions), shares, k=len(trace))
    return [replace(one, function=to) for one, to in zip(trace, chosen, strict=True)]


def _burstiest(trace: Sequence[TraceRequest], begin_s: float, end_s: float, length_s: float) -> float:
    best, at_s = (-1.0, begin_s), begin_s
    while at_s + length_s <= end_s:
        part = [one.offset_s - at_s for one in _between(trace, at_s, at_s + length_s)]
        best = max(best, (burstiness(part, length_s), at_s), key=lambda pair: pair[0])
        at_s += _STEP_S
    return best[1]


def _between(trace: Sequence[TraceRequest], from_s: float, to_s: float) -> Sequence[TraceRequest]:
    first, end = (bisect_left(trace, at_s, key=lambda one: one.offset_s) for at_s in (from_s, to_s))
    return trace[first:end]
