"""The requests of days that are made of a trace, for many functions (pure).

A day repeats the trace, each time with the rate of that time of day: a cosine between `_NIGHT` and its peak
at `_PEAK_H`, with a mean of 1. A factor of 2.3 means that each request comes twice, and with a chance of 0.3
once more, copies moved by up to `_JITTER_S`. Functions have rates by Zipf's law, begin at different places of
the trace, and live in different time zones. Equal seeds give equal requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.traces import TraceRequest, trim_to_context

_NIGHT = 0.4
_PEAK_H = 14.0
_ZONE_H = 2.0  # the standard deviation of functions' time zones
_JITTER_S = 2.0

Floats = NDArray[np.float64]


def each_function(requests: Sequence[TraceRequest], functions: int) -> list[list[TraceRequest]]:
    """Return the requests of each function."""
    found: list[list[TraceRequest]] = [[] for _ in range(functions)]
    for one in requests:
        found[one.function].append(one)
    return found


def daily_factor(at_s: float) -> float:
    """Return the rate at a time of day, of which the mean over a day is 1."""
    wave = np.cos(2 * np.pi * (at_s / 3600 - _PEAK_H) / 24)
    return float(1 + (1 - _NIGHT) * wave)


def zipf_weights(functions: int) -> list[float]:
    """Return the shares of the functions in all requests, the largest first."""
    total = sum(1 / rank for rank in range(1, functions + 1))
    return [1 / rank / total for rank in range(1, functions + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DayTrace:
    """A trace as the source of days: `rate` is its mean number of requests a second."""

    offset_s: Floats
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    @classmethod
    def of(cls, trace: Sequence[TraceRequest], context: int) -> "DayTrace":
        trimmed = trim_to_context(trace, context).arrivals
        return cls(
            offset_s=np.array([one.offset_s for one in trimmed]),
            prompt_tokens=np.array([one.prompt_tokens for one in trimmed]),
            output_tokens=np.array([one.output_tokens for one in trimmed]),
        )

    @property
    def period_s(self) -> float:
        return float(self.offset_s[-1]) + 1.0

    @property
    def rate(self) -> float:
        return len(self.offset_s) / self.period_s

    def arrivals(
        self, *, function: int, rate: float, hours: float, seed: int, start_h: float = 0.0
    ) -> Iterator[TraceRequest]:
        """Yield a function's requests of `rate` a second on average over a day, in order of time."""
        draw = np.random.default_rng((seed, function))
        shift_s, zone_s = draw.uniform(0, self.period_s), draw.normal(0, _ZONE_H) * 3600
        for number in range(int(np.ceil(hours * 3600 / self.period_s))):
            begin_s = number * self.period_s
            times = begin_s + (self.offset_s + shift_s) % self.period_s
            middle_s = start_h * 3600 + begin_s + self.period_s / 2
            factor = rate / self.rate * daily_factor(middle_s + zone_s)
            copies = int(factor) + (draw.random(len(times)) < factor % 1)
            rows = np.repeat(np.arange(len(times)), copies)
            again = np.concatenate(([False], rows[1:] == rows[:-1])) if len(rows) else np.zeros(0, bool)
            moved = times[rows] + again * draw.uniform(-_JITTER_S, _JITTER_S, len(rows))
            moved = begin_s + (moved - begin_s) % self.period_s
            order = np.argsort(moved, kind="stable")
            columns = (moved[order], self.prompt_tokens[rows[order]], self.output_tokens[rows[order]])
            for at_s, prompt, output in zip(*(column.tolist() for column in columns), strict=True):
                if at_s >= hours * 3600:
                    return
                yield TraceRequest(at_s, prompt, output)
