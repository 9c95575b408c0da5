"""The page of all metrics, from the registry of a gateway that exports everything."""

from collections.abc import Iterator
from dataclasses import dataclass

from cli.reference.markdown import code, prose, table
from gateway.http.metrics import ControlFacts, Metrics
from registry.records.change import Snapshot

_HEAD = """\
# Metrics

What `/metrics` of a gateway exports, in Prometheus' text format. Counters have the suffix `_total`
there, histograms `_bucket`, `_sum` and `_count`. [What to watch, and
alerts](../docs/OPERATIONS.md#monitoring); [how they add up over gateways](../docs/HTTP.md#metrics).

"""
_GROUPS = (
    ("hypercast_tenant_", "Of tenants", "With `--tenant-metrics N`.\n\n"),
    ("vllm:", "By vLLM's names", "With `--vllm-metrics`.\n\n"),
    ("", "Of the platform and its functions", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFacts:
    """One metric as it is exported."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def metrics_page() -> str:
    """Return the page."""
    groups: dict[str, list[MetricFacts]] = {title: [] for _, title, _ in reversed(_GROUPS)}
    for metric in sorted(every_metric(), key=lambda one: one.name):
        groups[next(title for prefix, title, _ in _GROUPS if metric.name.startswith(prefix))].append(metric)
    notes = {title: note for _, title, note in _GROUPS}
    return _HEAD + "".join(
        f"## {title}\n\n{notes[title]}" + table(("metric", "type", "labels", "meaning"), map(_row, metrics))
        for title, metrics in groups.items()
    )


def every_metric() -> Iterator[MetricFacts]:
    """Yield the metrics of a gateway with all flags, which controls a cluster without anything in it."""
    empty = Snapshot(cursor="", functions=(), versions=(), nodes=(), instances=(), load_reports=())
    facts = ControlFacts(failovers=0, moved=0, desired={})
    metrics = Metrics(lambda: empty, lambda: facts, vllm_names=True, tenants=1)
    for family in metrics.registry.collect():
        # Families without a sample hold their labels in this alone; those of the library itself have none.
        labels = tuple(getattr(family, "_labelnames", ()))
        yield MetricFacts(name=family.name, kind=family.type, labels=labels, text=family.documentation)


def _row(metric: MetricFacts) -> tuple[str, str, str, str]:
    shown = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    return code(shown), metric.kind, ", ".join(map(code, metric.labels)), prose(metric.text)
