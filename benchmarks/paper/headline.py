"""The measures of trace runs that the page shows for every scenario, and the papers' numbers beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.paper.claims import Figure

SCENARIOS: Mapping[str, str] = {
    "trace-conv-8-nodes": "conversation, 8 nodes",
    "trace-conv-12-nodes": "conversation, 12 nodes",
    "trace-code-8-nodes": "code, 8 nodes",
    "trace-code-12-nodes": "code, 12 nodes",
}
ROBUST: Mapping[str, str] = {
    "trace-burstgpt": "arrivals fitted to BurstGPT",
    "trace-late-0": "no late step or hop is forgiven",
    "trace-slower-2": "half the real speed",
    "trace-slower-5": "a fifth of the real speed",
    "trace-7b": "Llama-2 7B",
    "trace-70b": "Llama-2 70B",
    "trace-12-functions": "12 functions",
}
LABELS: Mapping[str, str] = {
    "hypercast": "hypercast (default)",
    "hypercast-pipeline": "hypercast, `live: pipeline`",
    "serverlessllm": "ServerlessLLM-like",
    "serverlessllm-allcache": "the same, every host has the model",
    "faasnet": "FaaSNet-like tree",
    "nccl": "NCCL-like ring",
    "blitzscale": "BlitzScale-like chain",
    "fixed-full": "all nodes, fixed",
    "fixed-half": "half of the nodes, fixed",
    "ideal": "ideal: loads take no time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure for all scenarios, beside what the papers report."""

    label: str
    reports: str
    figure: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A field of the records; `relative` adds its ratio to ours."""

    title: str
    field: str
    format: str
    unit: str = ""
    relative: bool = False


def _row(label: str, reports: str, expression: str, spec: str, unit: str) -> Row:
    return Row(label=label, reports=reports, figure=Figure(label, "", expression, spec, unit))


def _gpu(rival: str) -> str:
    return f"hypercast.gpu_s / {rival}.gpu_s - 1 * -100"


HEADLINE: Sequence[Row] = (
    _row("GPU time less than FaaSNet-like", "up to 17.8 % (F)", _gpu("faasnet"), ".1f", " %"),
    _row("GPU time less than NCCL-like", "up to 18.1 % (F)", _gpu("nccl"), ".1f", " %"),
    _row("GPU time less than ServerlessLLM-like", "up to 31.3 % (F)", _gpu("serverlessllm"), ".1f", " %"),
    _row("GPU time less than all nodes, fixed", "49 to 50 % (B)", _gpu("fixed-full"), ".1f", " %"),
    _row(
        "GPU time more than ideal",
        "4.3 to 18.6 % (F)",
        "hypercast.gpu_s / ideal.gpu_s - 1 * 100",
        ".1f",
        " %",
    ),
    _row(
        "P90 TTFT sooner than ServerlessLLM-like, times",
        "5 (F)",
        "serverlessllm.ttft_p90_s / hypercast.ttft_p90_s",
        ".2f",
        "",
    ),
    _row(
        "P90 TTFT sooner than FaaSNet-like, times",
        "2.4 and more (F)",
        "faasnet.ttft_p90_s / hypercast.ttft_p90_s",
        ".2f",
        "",
    ),
    _row("SLO attainment, 1 s and 0.2 s", "", "hypercast.slo_attainment", ".3f", ""),
    _row("SLO attainment of FaaSNet-like", "", "faasnet.slo_attainment", ".3f", ""),
    _row("SLO attainment of ServerlessLLM-like", "", "serverlessllm.slo_attainment", ".3f", ""),
)
MEASURES: Sequence[Measure] = (
    Measure(title="GPU time, and in multiples of ours", field="gpu_s", format=".0f", unit="s", relative=True),
    Measure(
        title="SLO attainment: 1 s to the first token, 0.2 s between tokens",
        field="slo_attainment",
        format=".3f",
    ),
    Measure(
        title="SLO attainment: 5 times the means of all nodes, fixed", field="slo_5x_attainment", format=".3f"
    ),
    Measure(title="mean TTFT", field="ttft_mean_s", format=".2f", unit="s", relative=True),
    Measure(title="P90 TTFT", field="ttft_p90_s", format=".2f", unit="s", relative=True),
    Measure(title="P99 TTFT", field="ttft_p99_s", format=".2f", unit="s", relative=True),
    Measure(title="P99 time between tokens", field="tbt_p99_s", format=".3f", unit="s", relative=True),
    Measure(title="GPU time in which instances load", field="gpu_loading_s", format=".1f", unit="s"),
    Measure(
        title="model copies in host memory, bytes × seconds",
        field="host_byte_s",
        format=".3g",
        unit="B s",
        relative=True,
    ),
    Measure(title="bytes received by casts", field="cast_bytes", format=".3g", unit="B"),
)
