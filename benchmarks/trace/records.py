"""The record of a mode from its runs, in model time (pure)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.percentile import percentile, quantiles
from benchmarks.trace.client import StreamedAnswer
from benchmarks.trace.decisions import decision_figures
from benchmarks.trace.link_use import network_use
from benchmarks.trace.measures import (
    Answer,
    ModelScale,
    Series,
    Slo,
    cumulated,
    integral,
    latencies,
    ttft_by_rate,
    ttft_by_start,
)
from benchmarks.trace.run import TraceResult
from benchmarks.trace.watch import UsageSample

LATE_LIMIT_S = 0.010  # of the machine
BUSY_LIMIT = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """One run of a mode, in model seconds since its first second."""

    answers: Sequence[Answer]
    failures: Sequence[str]
    gaps_s: Sequence[float]
    ended_s: float
    answered_after_end: int
    gpu_s: float
    loading_s: float
    busy_s: float
    instances: Series
    ready: Series
    host_bytes: Series
    cast_bytes: float
    late_s: float
    processor_share: float
    saturated_share: float
    ledger: dict[str, Any]
    ledger_ok: bool
    network: dict[str, Any]
    decisions: dict[str, Any]
    free_reads: int
    plans: dict[str, Any]

    @property
    def host_byte_s(self) -> float:
        return integral(self.host_bytes, 0.0, self.ended_s)

    @property
    def faults(self) -> list[str]:
        """Why the run does not count."""
        found = []
        if self.failures:
            found.append(f"{len(self.failures)} requests failed, the first: {self.failures[0]}")
        if not self.ledger_ok:
            found.append("the ledger is not exact")
        if self.late_s >= LATE_LIMIT_S:
            found.append(f"the client was {self.late_s * 1e3:.0f} ms late")
        if self.processor_share >= BUSY_LIMIT:
            found.append(f"processors were {self.processor_share:.0%} busy")
        if self.free_reads:
            found.append(f"{self.free_reads} starts read the store at this machine's speed")
        return found

    def summary(self, slo: Slo) -> dict[str, Any]:
        """Return what differs between runs."""
        return {
            "gpu_s": round(self.gpu_s, 3),
            "slo_attainment": round(slo.attainment(self.answers, len(self.failures)), 5),
            "ttft_p90_s": percentile([one.ttft_s for one in self.answers], 90),
            "failed": len(self.failures),
            "window_s": round(self.ended_s, 3),
            "answered_after_end": self.answered_after_end,
            "client_late_p99_s": round(self.late_s, 6),
            "processor_share": round(self.processor_share, 3),
            "saturated_share": round(self.saturated_share, 3),
            "ledger_ok": self.ledger_ok,
            "faults": self.faults,
        }


def run_of(result: TraceResult, how: ModelScale) -> TraceRun:
    """Convert a run to model time, and bytes to those of the whole model."""
    sent, slower, scale = result.sent, how.slower, how.scale
    before = [one for one in result.samples if one.at_s <= sent.started_s]
    samples = before[-1:] + [
        one for one in result.samples if sent.started_s < one.at_s <= sent.started_s + sent.ended_s
    ]

    def series(value: Any, of: Sequence[UsageSample] = samples) -> Series:
        found: list[tuple[float, float]] = []
        for one in of:
            at_s, now = max(0.0, one.at_s - sent.started_s) / slower, value(one)
            if not found or found[-1][1] != now:
                found.append((round(at_s, 4), now))
        return found

    casts = [one.cast_bytes for one in samples]
    return TraceRun(
        answers=[_answer(one, slower) for one in sent.answers if not one.failure],
        failures=[one.failure for one in sent.answers if one.failure],
        gaps_s=[gap / 1e6 / slower for one in sent.answers for gap in one.gaps_us],
        ended_s=sent.ended_s / slower,
        answered_after_end=sum(one.last_s > sent.ended_s for one in sent.answers),
        gpu_s=sent.gpu_s / slower,
        loading_s=sent.loading_s / slower,
        busy_s=sent.busy_s / slower,
        instances=series(lambda one: one.allocated),
        ready=series(lambda one: one.ready),
        host_bytes=series(lambda one: one.host_bytes * scale),
        cast_bytes=(max(casts) - casts[0]) * scale if casts else 0.0,
        late_s=sent.late_s,
        processor_share=sent.processor_share,
        saturated_share=sent.saturated_share,
        ledger=sent.ledger,
        ledger_ok=sent.ledger_ok,
        network=network_use(result.links, sent.started_s, sent.ended_s, how),
        decisions=decision_figures(result.decisions, sent, slower),
        free_reads=0 if result.own_disk else list(result.plans.sources.values()).count("disk"),
        plans=result.plans.record(),
    )


def _answer(one: StreamedAnswer, slower: int) -> Answer:
    between_s = (one.last_s - one.first_s) / (one.tokens - 1) / slower if one.tokens > 1 else None
    return Answer(
        due_s=one.due_s / slower,
        ttft_s=(one.first_s - one.due_s) / slower,
        tbt_s=between_s,
        tokens=one.tokens,
        start_kind=one.start_kind,
    )


def record_of(name: str, runs: Sequence[TraceRun], slo: Slo, params: dict[str, Any]) -> dict[str, Any]:
    """Return a mode's record: latencies of all runs' requests, sums and courses of the median run."""
    middle = sorted(runs, key=lambda run: run.gpu_s)[len(runs) // 2]
    answers = [one for run in runs for one in run.answers]
    failed = sum(len(run.failures) for run in runs)
    ttfts, gaps = [one.ttft_s for one in answers], [gap for run in runs for gap in run.gaps_s]
    return {
        "name": name,
        "emulated": True,
        "params": params,
        "requests": len(answers) + failed,
        "failed": failed,
        "gpu_s": middle.gpu_s,
        "gpu_loading_s": middle.loading_s,
        "gpu_busy_s": middle.busy_s,
        "slo_attainment": slo.attainment(answers, failed),
        **latencies("ttft", ttfts, (50, 90, 99)),
        "ttft_mean_s": sum(ttfts) / max(1, len(ttfts)),
        **latencies("tbt", gaps, (50, 99)),
        "host_byte_s": middle.host_byte_s,
        "cast_bytes": middle.cast_bytes,
        "network": middle.network,
        "window_s": middle.ended_s,
        "answered_after_end": middle.answered_after_end,
        "instances": middle.instances,
        "ready": middle.ready,
        "host_bytes": middle.host_bytes,
        "gpu_cumulated": cumulated(middle.instances, 0.0, middle.ended_s),
        "ttft_quantiles_s": quantiles(ttfts),
        "tbt_quantiles_s": quantiles(gaps),
        "ttft_over_time": [(round(one.due_s, 2), round(one.ttft_s, 3)) for one in middle.answers],
        "start_kinds": dict(Counter(one.start_kind for one in answers)),
        "ttft_by_start": ttft_by_start(answers),
        "ttft_by_rate": ttft_by_rate(answers, len(runs)),
        **middle.plans,
        **middle.decisions,
        "client_late_p99_s": max(run.late_s for run in runs),
        "processor_share": max(run.processor_share for run in runs),
        "saturated_share": max(run.saturated_share for run in runs),
        "ledger_ok": all(run.ledger_ok for run in runs),
        "ledger": middle.ledger,
        "counts": not any(run.faults for run in runs),
        "runs": [run.summary(slo) for run in runs],
    }


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    faults = sorted({fault for run in row["runs"] for fault in run["faults"]})
    return (
        f"{row['name']:22} {'' if row['counts'] else 'DOES NOT COUNT  '}"
        f"GPU {row['gpu_s']:7.1f} s  SLO {row['slo_attainment']:.3f}  "
        f"TTFT p50 {row['ttft_p50_s']:.3f} p90 {row['ttft_p90_s']:.3f} p99 {row['ttft_p99_s']:.3f} s  "
        f"TBT p50 {row['tbt_p50_s'] * 1e3:.0f} p99 {row['tbt_p99_s'] * 1e3:.0f} ms  "
        f"host {row['host_byte_s'] / 1e9:.0f} GB s  casts {row['cast_bytes'] / 1e9:.0f} GB  "
        f"busy {row['processor_share']:.0%}, saturated {row['saturated_share']:.0%} of the seconds, "
        f"late {row['client_late_p99_s'] * 1e3:.1f} ms"
        + "".join(f"\n  does not count: {fault}" for fault in faults)
    )


def compare(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line per other mode: its GPU time and P90 beside the first one's."""
    if not rows:
        return []
    first, *others = rows
    return [
        f"  {first['name']} vs {row['name']}: {first['gpu_s'] / row['gpu_s'] - 1:+.1%} GPU time, "
        f"P90 TTFT {row['ttft_p90_s'] / first['ttft_p90_s']:.2f} times sooner, "
        f"SLO {first['slo_attainment']:.3f} vs {row['slo_attainment']:.3f}"
        for row in others
    ]
