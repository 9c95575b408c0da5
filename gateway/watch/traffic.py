"""Requests and tokens per second of each version, from counts that only grow. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from gateway.cluster.traffic_sums import TrafficKey as Key
from gateway.cluster.traffic_sums import TrafficSums
from registry.records.change import CallTraffic, LoadReport

SAMPLE_S = 0.5  # between two samples
_TOKENS_OVER_S = 2.0
_REQUESTS_OVER_S = 10.0
_SAMPLES = int(_REQUESTS_OVER_S / SAMPLE_S) + 1


class ShownTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of one version: of the last two seconds for tokens, else of the last ten.

    `ttft_ms` is the mean time to the first token, waiting included, null without one.
    """

    function: str
    version: int
    in_flight: int
    held: int
    requests_s: float
    tokens_s: float
    ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    counts: CallTraffic


class TrafficMeter:
    """Rates of the whole cluster: this gateway's own counts now, and those that others last reported."""

    def __init__(self, gateway: str) -> None:
        self._sums = TrafficSums(gateway)
        self._samples: dict[Key, deque[_Sample]] = {}
        self._next_s = 0.0

    def __repr__(self) -> str:
        return f"<TrafficMeter of {len(self._samples)} versions>"

    def sample(self, own: Mapping[Key, CallTraffic], reports: Iterable[LoadReport], now_s: float) -> None:
        """Take the counts of `now_s` (monotonic), unless the last ones are newer than SAMPLE_S."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_S
        self._sums.update(own, reports)
        for key, counts in self._sums.sums.items():
            samples = self._samples.get(key)
            if samples is None:
                samples = self._samples[key] = deque(maxlen=_SAMPLES)
                if counts != CallTraffic():  # served since the sample before, when there was nothing
                    samples.append(_Sample(now_s - SAMPLE_S, CallTraffic()))
            samples.append(_Sample(now_s, counts))

    def shown(self, reports: Iterable[LoadReport]) -> list[ShownTraffic]:
        """Return the versions with calls or rates, as of the last sample."""
        loads: dict[Key, tuple[int, int]] = {}
        for report in reports:
            for load in report.loads:
                in_flight, held = loads.get((load.function, load.version), (0, 0))
                loads[load.function, load.version] = (in_flight + load.in_flight, held + load.held)
        found = []
        for key in loads.keys() | self._samples.keys():
            samples = self._samples.get(key, deque())
            requests_s = _rate(samples, _REQUESTS_OVER_S, lambda counts: counts.requests)
            tokens_s = _rate(samples, _TOKENS_OVER_S, lambda counts: counts.output_tokens)
            in_flight, held = loads.get(key, (0, 0))
            if not (in_flight or held or requests_s or tokens_s):
                continue
            found.append(
                ShownTraffic(
                    function=key[0],
                    version=key[1],
                    in_flight=in_flight,
                    held=held,
                    requests_s=round(requests_s, 2),
                    tokens_s=round(tokens_s, 1),
                    ttft_ms=_mean_first_ms(samples),
                )
            )
        return found

    def keep(self, functions: frozenset[str]) -> None:
        """Drop the counts of all other functions."""
        self._sums.keep(functions)
        for key in [key for key in self._samples if key[0] not in functions]:
            del self._samples[key]


def _rate(samples: deque[_Sample], over_s: float, count: Callable[[CallTraffic], int]) -> float:
    if len(samples) < 2:
        return 0.0
    last = samples[-1]
    first = next(one for one in samples if last.at_s - one.at_s <= over_s + SAMPLE_S / 2)
    span_s = last.at_s - first.at_s
    return (count(last.counts) - count(first.counts)) / span_s if span_s > 0 else 0.0


def _mean_first_ms(samples: deque[_Sample]) -> float | None:
    if len(samples) < 2:
        return None
    first, last = samples[0].counts, samples[-1].counts
    tokens = last.first_tokens - first.first_tokens
    return round((last.first_token_s - first.first_token_s) / tokens * 1000, 1) if tokens > 0 else None
