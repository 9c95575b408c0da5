"""The records: one a scenario and condition (pure)."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.percentile import percentile
from benchmarks.harness.records import Record
from benchmarks.interference.conditions import ALONE, Condition, ServingScenario
from benchmarks.interference.figures import first_tokens_within, gaps_within
from benchmarks.interference.run import ScenarioRun

_MAX_TBT_RATIO = 1.2
_MAX_CAST_RATIO = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of streams under one condition, and of its casts, in model time."""

    gaps_s: Sequence[float]
    first_tokens_s: Sequence[float]
    casts_s: Sequence[float]
    sources: Sequence[str]

    @property
    def tbt_p99_s(self) -> float:
        return percentile(self.gaps_s, 99) or 0.0

    @property
    def cast_s(self) -> float:
        return statistics.median(self.casts_s) if self.casts_s else 0.0


def times_of(run: ScenarioRun, condition: Condition, slower: int) -> Times:
    """Return what a run measured under a condition; devices and links were `slower` times slower."""
    windows = [window for window in run.windows if window.condition == condition.name]
    whole = [one for one in run.streams if not one.failure]
    return Times(
        gaps_s=[gap_s / slower for gap_s in gaps_within(whole, windows)],
        first_tokens_s=[ttft_s / slower for ttft_s in first_tokens_within(whole, windows)],
        casts_s=[window.cast_s / slower for window in windows if condition.casts],
        sources=sorted({source for window in windows for source in window.sources}),
    )


def records_of(scenario: ServingScenario, run: ScenarioRun, slower: int, common: Record) -> list[Record]:
    """Return a record of each condition; one of the scenario's is without casts."""
    alone = times_of(run, ALONE, slower)
    idle_s = statistics.median(run.idle_casts_s) / slower
    failed = [one.failure for one in run.streams if one.failure]
    return [
        {
            "name": f"{scenario.name}-{condition.name}",
            "params": {**common, "scenario": scenario.description, "condition": condition.description},
            **_figures(times_of(run, condition, slower), alone, idle_s),
            "idle_cast_s": idle_s,
            "processor_share": round(run.processor_share, 3),
            "streams": len(run.streams),
            "failed": failed,
            "counts": not failed,
        }
        for condition in scenario.conditions
    ]


def _figures(times: Times, alone: Times, idle_s: float) -> Record:
    figures: Record = {
        "gaps": len(times.gaps_s),
        "tbt_p50_s": percentile(times.gaps_s, 50),
        "tbt_p99_s": times.tbt_p99_s,
        "tbt_max_s": max(times.gaps_s, default=None),
        "tbt_p99_ratio": times.tbt_p99_s / alone.tbt_p99_s if alone.tbt_p99_s else None,
        "first_tokens": len(times.first_tokens_s),
        "ttft_p50_s": percentile(times.first_tokens_s, 50),
        "ttft_p99_s": percentile(times.first_tokens_s, 99),
    }
    if not times.casts_s:
        return figures
    cast_ratio = times.cast_s / idle_s
    return {
        **figures,
        "casts_s": list(times.casts_s),
        "cast_s": times.cast_s,
        "cast_ratio": cast_ratio,
        "sources": list(times.sources),
        "meets": (figures["tbt_p99_ratio"] or 0.0) <= _MAX_TBT_RATIO and cast_ratio <= _MAX_CAST_RATIO,
    }


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    line = (
        f"{row['name']:24} TBT P50 {_ms(row['tbt_p50_s'])}, P99 {_ms(row['tbt_p99_s'])} "
        f"({row['tbt_p99_ratio'] or 0.0:.2f} x alone), TTFT P50 {_ms(row['ttft_p50_s'])}, "
        f"P99 {_ms(row['ttft_p99_s'])}"
    )
    if "cast_s" not in row:
        return line
    return f"{line}; cast {row['cast_s']:.3f} s ({row['cast_ratio']:.2f} x idle) from {row['sources']}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
