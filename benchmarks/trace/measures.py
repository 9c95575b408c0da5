"""SLO attainment, sums over time, and percentiles of the answers to a trace (pure)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.percentile import percentile

Series = Sequence[tuple[float, float]]  # (second, value from then on)


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


def quantiles(values: Iterable[float], count: int = 200) -> list[float]:
    """Return evenly spaced quantiles, the least and the greatest among them."""
    ordered = sorted(values)
    if not ordered:
        return []
    last = len(ordered) - 1
    return [round(ordered[round(last * step / count)], 6) for step in range(count + 1)]


def latencies(name: str, values: Sequence[float], shares: Sequence[int]) -> dict[str, float | None]:
    """Return the percentiles as fields of a record."""
    return {f"{name}_p{share}_s": percentile(values, share) for share in shares}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
