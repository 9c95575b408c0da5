"""From the tokens of a burst to records: how soon the first came, and how many a second over time (pure)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.percentile import percentile

WINDOW_S = 0.25  # of the model's time: tokens a second are those of the last quarter of a second
STEP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a burst, in seconds of the model's time since it began."""

    arrived_s: tuple[float, ...]
    tokens: tuple[int, ...]
    start_kind: str

    @property
    def ttft_s(self) -> float:
        return self.arrived_s[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tokens a second of all requests, at every STEP_S."""

    per_s: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.per_s)

    @property
    def half_peak_s(self) -> float:
        """When half of the peak is reached first."""
        return next(at for at, rate in enumerate(self.per_s) if rate >= self.peak / 2) * STEP_S


def requests_of(answers: Sequence[dict[str, Any]], slower: int) -> list[Request]:
    """What the client told, in the model's time. Raises ValueError for a request that failed."""
    failures = [answer["failure"] for answer in answers if answer["failure"]]
    if failures:
        raise ValueError(f"{len(failures)} of {len(answers)} requests failed, the first: {failures[0]}")
    return [
        Request(
            arrived_s=tuple(moment / slower for moment in answer["arrived_s"]),
            tokens=tuple(answer["tokens"]),
            start_kind=answer["start_kind"],
        )
        for answer in answers
    ]


def rate_of(requests: Iterable[Request]) -> Rate:
    """Tokens of the window that ends at each step, by its length."""
    tokens = sorted(
        pair for request in requests for pair in zip(request.arrived_s, request.tokens, strict=True)
    )
    rates, first, last, inside = [], 0, 0, 0
    steps = int(tokens[-1][0] / STEP_S) + 2
    for step in range(steps):
        end_s = step * STEP_S
        while last < len(tokens) and tokens[last][0] <= end_s:
            inside += tokens[last][1]
            last += 1
        while first < last and tokens[first][0] <= end_s - WINDOW_S:
            inside -= tokens[first][1]
            first += 1
        rates.append(inside / WINDOW_S)
    return Rate(per_s=tuple(rates))


def first_of_loading(requests: Iterable[Request]) -> float | None:
    """When a request had its first token that waited for a node without the model, or was served by
    nodes on which it was arriving. A holder that starts from its own memory is none of these."""
    waited = [request.ttft_s for request in requests if request.start_kind in ("cold", "live")]
    return min(waited, default=None)


def record_of(
    name: str, runs: Sequence[Sequence[Request]], limit_s: float, params: dict[str, Any]
) -> dict[str, Any]:
    """All runs of one mode: percentiles over all their requests, the rate of the median run."""
    ttfts = sorted(request.ttft_s for run in runs for request in run)
    rates = sorted((rate_of(run) for run in runs), key=lambda rate: rate.half_peak_s)
    middle = rates[len(rates) // 2]
    median_s = percentile(ttfts, 50)
    assert median_s is not None
    loading = [moment for run in runs if (moment := first_of_loading(run)) is not None]
    return {
        "name": name,
        "emulated": True,
        "params": params,
        "seconds": [round(ttft, 4) for ttft in ttfts],
        "median_s": median_s,
        "limit_s": limit_s,
        "ratio_to_limit": median_s / limit_s,
        "ttft_p50_s": median_s,
        "ttft_p90_s": percentile(ttfts, 90),
        "ttft_p99_s": percentile(ttfts, 99),
        "first_of_loading_s": min(loading, default=None),
        "peak_tokens_per_s": middle.peak,
        "half_peak_s": middle.half_peak_s,
        "tokens_per_s": [round(rate, 1) for rate in middle.per_s],
        "step_s": STEP_S,
        "start_kinds": dict(Counter(request.start_kind for run in runs for request in run)),
    }


def show(row: dict[str, Any]) -> str:
    """One line for people."""
    params, loading = row["params"], row["first_of_loading_s"]
    return (
        f"{row['name']:21} emulated k={params['sources']} in {params['holders']:4}"
        f"  TTFT p50 {row['ttft_p50_s']:6.3f} p90 {row['ttft_p90_s']:6.3f} s"
        f"  first of a loading node {'-' if loading is None else f'{loading:.3f} s'}"
        f"  peak {row['peak_tokens_per_s']:6.0f} tokens/s, half of it at {row['half_peak_s']:5.2f} s"
        f"  {row['start_kinds']}"
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """For each number and kind of holders: tokens a second over time, and the TTFT's distribution."""
    from matplotlib.figure import Figure  # in the extra [dev] alone

    cases = list(dict.fromkeys((row["params"]["holders"], row["params"]["sources"]) for row in rows))
    figure = Figure(figsize=(13, 4 * len(cases)), layout="constrained")
    for (holders, sources), (over_time, cdf) in zip(
        cases, figure.subplots(len(cases), 2, squeeze=False), strict=True
    ):
        of_case = [
            row for row in rows if (row["params"]["holders"], row["params"]["sources"]) == (holders, sources)
        ]
        for row in of_case:
            rates, ttfts = row["tokens_per_s"], row["seconds"]
            over_time.plot([at * row["step_s"] for at in range(len(rates))], rates, label=row["name"])
            cdf.plot(ttfts, [(at + 1) / len(ttfts) for at in range(len(ttfts))], label=row["name"])
        params = of_case[0]["params"]
        case = f"{params['emulated']}: {params['nodes']} nodes, {sources} with the model in {holders} memory"
        over_time.set(title=case, xlabel="seconds", ylabel="tokens/s")
        cdf.set(xlabel="time to first token, seconds", ylabel="share of requests")
        cdf.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
