"""SLO attainment, sums over time, and percentiles of the answers to a trace (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.percentile import percentile

Series = Sequence[tuple[float, float]]  # (second, value from then on)

_RATE_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answered request, in model seconds; `ttft_s` counts from `due_s`, when it was to be sent.

    `tbt_s` is the mean between tokens, None for a single one.
    """

    due_s: float
    ttft_s: float
    tbt_s: float | None
    tokens: int
    start_kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScale:
    """How times and bytes of the machine become those of the model.

    Devices and links are `slower`, images, caches and hidden states 1/`scale` of the model's; a link carries
    `link_bytes_s` there.
    """

    slower: int
    scale: int
    link_bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The bounds of a request's time to first token and mean time between tokens."""

    ttft_s: float
    tbt_s: float

    def holds(self, answer: Answer) -> bool:
        return answer.ttft_s <= self.ttft_s and (answer.tbt_s is None or answer.tbt_s <= self.tbt_s)

    def attainment(self, answers: Sequence[Answer], failed: int = 0) -> float:
        """Return the share of requests within the bounds; failed ones are not."""
        count = len(answers) + failed
        return sum(map(self.holds, answers)) / count if count else 0.0


def five_means(answers: Sequence[Answer]) -> Slo:
    """Return five times the mean of each latency."""
    tbts = [one.tbt_s for one in answers if one.tbt_s is not None]
    return Slo(ttft_s=5 * _mean([one.ttft_s for one in answers]), tbt_s=5 * _mean(tbts))


def integral(series: Series, from_s: float, to_s: float) -> float:
    """Return the sum over time of a value that changes in steps."""
    total, ends = 0.0, [at_s for at_s, _ in series[1:]] + [to_s]
    for (at_s, value), end_s in zip(series, ends, strict=True):
        total += value * max(0.0, min(end_s, to_s) - max(at_s, from_s))
    return total


def cumulated(series: Series, from_s: float, to_s: float, steps: int = 100) -> list[tuple[float, float]]:
    """Return the sum over time up to each of some moments."""
    moments = [from_s + (to_s - from_s) * step / steps for step in range(steps + 1)]
    return [(round(at_s, 3), round(integral(series, from_s, at_s), 3)) for at_s in moments]


def ttft_by_start(answers: Sequence[Answer]) -> dict[str, dict[str, float | None]]:
    """Return the TTFT of the requests of each kind of start: hot, live, warm, cold."""
    kinds = sorted({one.start_kind for one in answers})
    groups = {kind: [one.ttft_s for one in answers if one.start_kind == kind] for kind in kinds}
    return {
        kind: {"requests": len(ttfts), **latencies("ttft", ttfts, (50, 90, 99))}
        for kind, ttfts in groups.items()
    }


def ttft_by_rate(answers: Sequence[Answer], runs: int) -> list[dict[str, float | None]]:
    """Return the TTFT of the requests of some runs by how many were due in the same second of each.

    Groups, from the least rate on, have about equal numbers of requests; one has all of a rate.
    """
    seconds: dict[int, list[float]] = {}
    for one in answers:
        seconds.setdefault(int(one.due_s), []).append(one.ttft_s)
    by_rate: dict[int, list[float]] = {}
    for ttfts in seconds.values():
        by_rate.setdefault(round(len(ttfts) / runs), []).extend(ttfts)
    groups: list[tuple[int, int, list[float]]] = []
    for rate, ttfts in sorted(by_rate.items()):
        if groups and len(groups[-1][2]) < len(answers) / _RATE_GROUPS:
            least, _, earlier = groups.pop()
            groups.append((least, rate, earlier + ttfts))
        else:
            groups.append((rate, rate, ttfts))
    return [
        {
            "from_per_s": least,
            "to_per_s": greatest,
            "requests": len(ttfts),
            **latencies("ttft", ttfts, (50, 90)),
        }
        for least, greatest, ttfts in groups
    ]


def latencies(name: str, values: Sequence[float], shares: Sequence[int]) -> dict[str, float | None]:
    """Return the percentiles as fields of a record."""
    return {f"{name}_p{share}_s": percentile(values, share) for share in shares}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
