"""Records from the tokens of a burst: times to first token, and token rates over time (pure)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.harness.percentile import percentile
from benchmarks.scaleout.client import BurstAnswer
from benchmarks.scaleout.watch import ServingSet, serving_record

WINDOW_S = 0.1  # model time; a rate is of the last tenth of a second
STEP_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRequest:
    """One request of a burst, in model seconds since the burst."""

    arrived_s: tuple[float, ...]
    tokens: tuple[int, ...]
    start_kind: str

    @property
    def ttft_s(self) -> float:
        return self.arrived_s[0]


class TokenArrival(NamedTuple):
    """Tokens that arrived together; `first` of them are the first of their requests."""

    at_s: float
    tokens: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRun:
    """One burst: its requests and what served meanwhile.

    `stairs` compares pipelines' throughput with the prediction, between changes of the serving set.
    """

    requests: Sequence[BurstRequest]
    seen: Sequence[ServingSet] = ()
    stairs: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRate:
    """Tokens per second of all requests, at every STEP_S."""

    per_s: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.per_s)

    @property
    def half_peak_s(self) -> float:
        """When half of the peak is first reached, interpolated between steps."""
        return self._passed_s(next(at for at, rate in enumerate(self.per_s) if rate >= self.peak / 2))

    @property
    def held_half_peak_s(self) -> float:
        """When half of the peak is reached for the last time before the peak."""
        top = self.per_s.index(self.peak)
        low = (at for at in range(top, -1, -1) if self.per_s[at] < self.peak / 2)
        return self._passed_s(next(low, -1) + 1)

    def made(self, until_s: float) -> float:
        """Return the tokens until `until_s`."""
        return sum(self.per_s[: round(until_s / STEP_S)]) * STEP_S

    def _passed_s(self, at: int) -> float:
        """Return when half of the peak was crossed on the way to this step."""
        half, before = self.peak / 2, self.per_s[at - 1] if at else 0.0
        return (at - (self.per_s[at] - half) / (self.per_s[at] - before)) * STEP_S if at else 0.0


def requests_of(answers: Sequence[BurstAnswer], slower: int) -> list[BurstRequest]:
    """Convert the client's report to model time. Raises ValueError for a failed request."""
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise ValueError(f"{len(failures)} of {len(answers)} requests failed, the first: {failures[0]}")
    return [
        BurstRequest(
            arrived_s=tuple(moment / slower for moment in answer.arrived_s),
            tokens=tuple(answer.tokens),
            start_kind=answer.start_kind,
        )
        for answer in answers
    ]


def arrivals(requests: Iterable[BurstRequest]) -> list[TokenArrival]:
    """Return the arrivals of all requests in order of time."""
    return sorted(
        TokenArrival(at_s, tokens, 0 if place else 1)
        for request in requests
        for place, (at_s, tokens) in enumerate(zip(request.arrived_s, request.tokens, strict=True))
    )


def rate_of(requests: Iterable[BurstRequest]) -> TokenRate:
    """Return the token rate: at each step, the tokens of the window that ends there over its length."""
    tokens = arrivals(requests)
    rates, first, last, inside = [], 0, 0, 0
    steps = int(tokens[-1][0] / STEP_S) + 2
    for step in range(steps):
        end_s = step * STEP_S
        while last < len(tokens) and tokens[last].at_s <= end_s:
            inside += tokens[last].tokens
            last += 1
        while first < last and tokens[first].at_s <= end_s - WINDOW_S:
            inside -= tokens[first].tokens
            first += 1
        rates.append(inside / WINDOW_S)
    return TokenRate(per_s=tuple(rates))


def first_token_of(requests: Iterable[BurstRequest], *kinds: str) -> float | None:
    """Return the earliest first token of requests with one of these start kinds.

    `live` ones were served by nodes still loading the model; `cold` ones waited for a node without it.
    """
    return min((request.ttft_s for request in requests if request.start_kind in kinds), default=None)


def record_of(
    name: str, runs: Sequence[BurstRun], limits: Mapping[str, float], params: dict[str, Any]
) -> dict[str, Any]:
    """Return a mode's record: percentiles over all runs' requests, the rate of the median run."""
    ttfts = sorted(request.ttft_s for run in runs for request in run.requests)
    rates = sorted(((rate_of(run.requests), run) for run in runs), key=lambda pair: pair[0].half_peak_s)
    middle, middle_run = rates[len(rates) // 2]
    median_s = percentile(ttfts, 50)
    assert median_s is not None
    live_s = _median(first_token_of(run.requests, "live") for run in runs)
    return {
        "name": name,
        "emulated": bool(params["emulated"]),
        "params": params,
        "seconds": [round(ttft, 4) for ttft in ttfts],
        "median_s": median_s,
        **limits,
        "ratio_to_limit": median_s / limits["limit_s"],
        "ttft_p50_s": median_s,
        "ttft_p90_s": percentile(ttfts, 90),
        "ttft_p99_s": percentile(ttfts, 99),
        "first_of_loading_s": _median(first_token_of(run.requests, "live", "cold") for run in runs),
        "first_live_s": live_s,
        "first_live_of_transfer": None if live_s is None else live_s / limits["transfer_s"],
        "peak_tokens_per_s": middle.peak,
        "half_peak_s": middle.half_peak_s,
        "held_half_peak_s": middle.held_half_peak_s,
        "tokens_per_s": [round(rate, 1) for rate in middle.per_s],
        "step_s": STEP_S,
        "window_s": WINDOW_S,
        "start_kinds": dict(Counter(request.start_kind for run in runs for request in run.requests)),
        "serving": [serving_record(serving) for serving in middle_run.seen],
        "stairs": list(middle_run.stairs),
        "least_of_predicted": least(middle_run.stairs),
    }


def _median(moments: Iterable[float | None]) -> float | None:
    return percentile([moment for moment in moments if moment is not None], 50)


def least(stairs: Iterable[dict[str, Any]]) -> float | None:
    """Return the smallest fraction of the prediction that was served on any stair."""
    return min((stair["of_predicted"] for stair in stairs if stair["of_predicted"] is not None), default=None)


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    params, share = row["params"], row["first_live_of_transfer"]
    live = "-" if share is None else f"{row['first_live_s']:.3f} s, {share:.2f} of a transfer"
    return (
        f"{row['name']:21} {'emulated' if row['emulated'] else 'real'} k={params['sources']} in "
        f"{params['holders']:5} TTFT p50 {row['ttft_p50_s']:6.3f} p90 {row['ttft_p90_s']:6.3f} s"
        f"  first live token {live}"
        f"  peak {row['peak_tokens_per_s']:6.0f} tokens/s, half of it at {row['half_peak_s']:6.3f} s"
        f"  {row['start_kinds']}"
    ) + "".join(f"\n  {_stair(stair)}" for stair in row["stairs"])


def _stair(stair: dict[str, Any]) -> str:
    share = stair["of_predicted"]
    return (
        f"{stair['from_s']:.3f}-{stair['to_s']:.3f} s: {stair['pipelines']} pipelines, {stair['instances']} "
        f"instances: {stair['tokens_per_s']:.0f} tokens/s of {stair['predicted_tokens_per_s']:.0f} "
        f"predicted by the profile: {'-' if share is None else format(share, '.2f')}; "
        f"{stair['prompts']} first tokens of {stair['predicted_prompts']}"
    )


def compare(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line per other mode: how much sooner the first mode is."""
    if not rows:
        return []
    first, *others = rows
    return [f"  {first['name']} vs {row['name']}: {_beside(first, row)}" for row in others]


def _beside(ours: dict[str, Any], other: dict[str, Any]) -> str:
    half_s = other["half_peak_s"]
    here, there = (TokenRate(per_s=tuple(row["tokens_per_s"])).made(half_s) for row in (ours, other))
    first, held = (ours[key] / other[key] for key in ("half_peak_s", "held_half_peak_s"))
    return (
        f"{'emulated ' if ours['emulated'] else ''}P90 TTFT {other['ttft_p90_s'] / ours['ttft_p90_s']:.2f} "
        f"times sooner, half of its peak after {first:.2f} of the time, sustained after {held:.2f}; "
        f"at {half_s:.3f} s {here:.0f} tokens vs {there:.0f}"
    )
