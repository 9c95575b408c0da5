"""Synthetic traces (seeded; no real request): BurstGPT's published burstiness and lengths, and a steady load.

BurstGPT (arXiv 2401.17644) finds that intervals between requests follow a gamma distribution of which the
parameters change over time, and BlitzScale (OSDI 2025) that on it the demand rises fivefold within two
seconds. So each period of some tens of seconds has a rate of its own, and some have a burst of two seconds at
five times the mean rate; within them intervals are gamma distributed with a coefficient of variation of
INTERVAL_CV. Lengths are log-normal with the mean and median of the GPT-4 conversations as Llumnix (OSDI 2024)
lists them: prompts of 830 and 582 tokens, outputs of 271 and 243. The steady load has the same lengths and
independent arrivals at a constant rate (a Poisson process).
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from benchmarks.harness.traces import TraceRequest

LENGTH_S = 3600.0
RATE_PER_S = 5.5
INTERVAL_CV = 2.0
BURST_TIMES, BURST_S, BURST_SHARE = 5.0, 2.0, 0.3
PROMPT_MEAN, PROMPT_MEDIAN = 830, 582
OUTPUT_MEAN, OUTPUT_MEDIAN = 271, 243
_PERIOD_S = (20.0, 60.0)


def bursty_trace(seed: int, length_s: float = LENGTH_S) -> list[TraceRequest]:
    """Return a trace fitted to BurstGPT, the same for the same seed."""
    draw = random.Random(seed)
    periods = _periods(draw, length_s)
    found = [_request(draw, at_s) for period in periods for at_s in _arrivals(draw, *period)]
    return sorted(found, key=lambda one: one.offset_s)


def steady_trace(seed: int, length_s: float = LENGTH_S) -> list[TraceRequest]:
    """Return a trace of a constant rate, the same for the same seed."""
    draw, at_s, found = random.Random(seed), 0.0, list[TraceRequest]()
    while (at_s := at_s + draw.expovariate(RATE_PER_S)) < length_s:
        found.append(_request(draw, at_s))
    return found


SYNTHETIC: Mapping[str, Callable[[int], list[TraceRequest]]] = MappingProxyType(
    {"synthetic-burstgpt": bursty_trace, "synthetic-steady": steady_trace}
)


def _request(draw: random.Random, at_s: float) -> TraceRequest:
    return TraceRequest(
        at_s, _length(draw, PROMPT_MEAN, PROMPT_MEDIAN), _length(draw, OUTPUT_MEAN, OUTPUT_MEDIAN)
    )


def _periods(draw: random.Random, length_s: float) -> Iterator[tuple[float, float, float]]:
    """Yield (from, to, rate); bursts overlap the periods in which they are."""
    burst = (BURST_TIMES - 1) * RATE_PER_S
    # The mean rate is that of periods and bursts together.
    usual = RATE_PER_S - BURST_SHARE * burst * BURST_S / (sum(_PERIOD_S) / 2)
    from_s = 0.0
    while from_s < length_s:
        to_s = min(length_s, from_s + draw.uniform(*_PERIOD_S))
        yield from_s, to_s, usual * draw.uniform(0.4, 1.6)
        if draw.random() < BURST_SHARE:
            at_s = draw.uniform(from_s, to_s)
            yield at_s, min(length_s, at_s + BURST_S), burst
        from_s = to_s


def _arrivals(draw: random.Random, from_s: float, to_s: float, rate: float) -> Iterator[float]:
    shape = 1 / INTERVAL_CV**2
    at_s = from_s + draw.random() * draw.gammavariate(shape, 1 / (shape * rate))
    while at_s < to_s:
        yield at_s
        at_s += draw.gammavariate(shape, 1 / (shape * rate))


def _length(draw: random.Random, mean: float, median: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))))
