"""Requests and tokens per second of each version, from counts that only grow. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from registry.records.change import CallTraffic, LoadReport

Key = tuple[str, int]

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
        self._gateway = gateway
        self._counts: dict[tuple[str, Key], CallTraffic] = {}  # by gateway and version, as last reported
        self._sums: dict[Key, CallTraffic] = {}  # that only grow, also where a gateway restarts
        self._samples: dict[Key, deque[_Sample]] = {}
        self._next_s = 0.0
        self._sampled = False

    def __repr__(self) -> str:
        return f"<TrafficMeter of {len(self._samples)} versions>"

    def sample(self, own: Mapping[Key, CallTraffic], reports: Iterable[LoadReport], now_s: float) -> None:
        """Take the counts of `now_s` (monotonic), unless the last ones are newer than SAMPLE_S."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_S
        for key, counts in own.items():
            # Its own counts are complete: what is new among them was served since the sample before.
            self._add(self._gateway, key, counts, since_zero=self._sampled)
        self._sampled = True
        for report in reports:
            if report.gateway != self._gateway:
                for load in report.loads:
                    key = load.function, load.version
                    self._add(report.gateway, key, load.traffic, since_zero=False)
        for key, counts in self._sums.items():
            samples = self._samples.get(key)
            if samples is None:
                samples = self._samples[key] = deque(maxlen=_SAMPLES)
                if counts != CallTraffic():  # served since the sample before, when there was nothing
                    samples.append(_Sample(now_s - SAMPLE_S, CallTraffic()))
            samples.append(_Sample(now_s, counts))

    def _add(self, gateway: str, key: Key, counts: CallTraffic, *, since_zero: bool) -> None:
        before = self._counts.get((gateway, key), CallTraffic() if since_zero else None)
        self._counts[gateway, key] = counts
        total = self._sums.get(key, CallTraffic())
        if before is None:  # whatever another had served before it was first seen is no traffic of now
            self._sums[key] = total
        elif counts is not before:
            base = before if counts.requests >= before.requests else CallTraffic()
            self._sums[key] = CallTraffic(
                requests=total.requests + counts.requests - base.requests,
                output_tokens=total.output_tokens + counts.output_tokens - base.output_tokens,
                first_tokens=total.first_tokens + counts.first_tokens - base.first_tokens,
                first_token_s=total.first_token_s + counts.first_token_s - base.first_token_s,
            )

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
        for key in [key for key in self._sums if key[0] not in functions]:
            del self._sums[key]
            self._samples.pop(key, None)
        for place in [place for place in self._counts if place[1][0] not in functions]:
            del self._counts[place]


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
