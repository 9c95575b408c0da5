"""The part of a trace that is sent (pure).

A trace has two halves: what is tuned on the first is reported on the second.
"""

import math
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

    `start` is in seconds of the half. The part ends with the half. Raises ValueError if it has no requests.
    """
    begin_s, end_s = bounds(trace, half)
    if isinstance(start, str):
        start = _burstiest(trace, begin_s, end_s, length_s) - begin_s
    from_s = begin_s + start
    to_s = min(end_s, from_s + length_s)
    part = _between(trace, from_s, to_s)
    if not part:
        raise ValueError(
            f"no requests from second {start:g} on: this part of the trace has {end_s - begin_s:.0f} s"
        )
    return from_s, [replace(one, offset_s=one.offset_s - from_s) for one in part]


def bounds(trace: Sequence[TraceRequest], half: str) -> tuple[float, float]:
    """Return the seconds between which a half lies."""
    end_s = trace[-1].offset_s
    after_s = math.nextafter(end_s, math.inf)  # parts are half-open
    return {"whole": (0.0, after_s), "first": (0.0, end_s / 2), "second": (end_s / 2, after_s)}[half]


def burstiness(offsets_s: Sequence[float], length_s: float) -> float:
    """Return the squared coefficient of variation of arrivals per five seconds."""
    bins = Counter(int(at_s / _BIN_S) for at_s in offsets_s)
    count = max(1, round(length_s / _BIN_S))
    mean = sum(bins.values()) / count
    square = sum(bins[index] ** 2 for index in range(count)) / count
    return square / mean**2 - 1 if mean else 0.0


def sample(part: Sequence[TraceRequest], share: float, seed: int) -> list[TraceRequest]:
    """Return each request with probability `share`, at its own time; at least the first one."""
    draw = random.Random(f"sample {seed}")
    return [one for one in part if draw.random() < share] or list(part[:1])


def spread(trace: Sequence[TraceRequest], functions: int, seed: int) -> list[TraceRequest]:
    """Return the requests, each to one of the functions, of which the n-th has 1/n of the first one's."""
    draw = random.Random(seed)
    chosen = draw.choices(range(functions), shares(functions), k=len(trace))
    return [replace(one, function=to) for one, to in zip(trace, chosen, strict=True)]


def shares(functions: int) -> list[float]:
    """Return the share of each function in the requests."""
    weights = [1 / (rank + 1) for rank in range(functions)]
    return [weight / sum(weights) for weight in weights]


def _burstiest(trace: Sequence[TraceRequest], begin_s: float, end_s: float, length_s: float) -> float:
    best, at_s = (-1.0, begin_s), begin_s
    while at_s + length_s <= end_s:
        part = [one.offset_s - at_s for one in _between(trace, at_s, at_s + length_s)]
        # Their variance, since a few requests of an idle service have the greatest coefficient.
        variance = burstiness(part, length_s) * len(part) ** 2
        best = max(best, (variance, at_s), key=lambda pair: pair[0])
        at_s += _STEP_S
    return best[1]


def _between(trace: Sequence[TraceRequest], from_s: float, to_s: float) -> Sequence[TraceRequest]:
    first, end = (bisect_left(trace, at_s, key=lambda one: one.offset_s) for at_s in (from_s, to_s))
    return trace[first:end]
