"""The measures of trace runs that the page shows for every scenario, and the papers' numbers beside them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.paper.claims import Figure

SCENARIOS: Mapping[str, str] = {
    "trace-conv-8-nodes": "conversation, 8 nodes",
    "trace-conv-12-nodes": "conversation, 12 nodes",
    "trace-code-8-nodes": "code, 8 nodes",
    "trace-code-12-nodes": "code, 12 nodes",
}
FROM_ZERO: Mapping[str, str] = {
    "trace-zero-code-8-nodes": "code, 8 nodes",
    "trace-zero-code-12-nodes": "code, 12 nodes",
    "trace-zero-conv-8-nodes": "conversation, 8 nodes",
    "trace-zero-conv-12-nodes": "conversation, 12 nodes",
}
ZERO_COPIES: Mapping[str, str] = {"trace-zero-copies": "code, 12 nodes, other modes"}
ROBUST: Mapping[str, str] = {
    "trace-burstgpt": "arrivals fitted to BurstGPT",
    "trace-late-0": "no late step or hop is forgiven",
    "trace-scale-1000": "four times the bytes to move in the same modelled time, code trace, 12 nodes",
    "trace-slower-2": "half the real speed",
    "trace-slower-5": "a fifth of the real speed",
    "trace-7b": "Llama-2 7B",
    "trace-70b": "Llama-2 70B",
    "trace-70b-slower-2": "Llama-2 70B, half the real speed",
}
LABELS: Mapping[str, str] = {
    "hypercast": "hypercast (default)",
    "hypercast-pipeline": "hypercast, `live: pipeline`",
    "hypercast-finish": "hypercast, `--drain-calls finish`",
    "serverlessllm": "ServerlessLLM-like",
    "serverlessllm-allcache": "the same, every host has the model",
    "faasnet": "FaaSNet-like tree",
    "faasnet-copies": "the same tree, with our copies and idle images",
    "nccl": "NCCL-like ring",
    "nccl-copies": "the same ring, with our copies and idle images",
    "blitzscale": "BlitzScale-like chain",
    "fixed-full": "all nodes, fixed",
    "fixed-half": "half of the nodes, fixed",
    "ideal": "ideal: loads take no time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure for all scenarios, beside what the papers report.

    The goal is between `least` and `most`; with neither there is none.
    """

    label: str
    reports: str
    figure: Figure
    least: float | None = None
    most: float | None = None

    @property
    def modes(self) -> set[str]:
        """The modes that the figure compares."""
        return set(re.findall(r"([a-z][\w-]*)\.", self.figure.expression))

    @property
    def goal(self) -> str:
        if self.least is not None:
            return f"at least {self.least:g}{self.figure.unit}"
        return "" if self.most is None else f"at most {self.most:g}{self.figure.unit}"

    def reached(self, value: float) -> bool:
        """Return whether a value is within the goal."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A field of the records; `relative` adds its ratio to ours."""

    title: str
    field: str
    format: str
    unit: str = ""
    relative: bool = False


def _gpu(rival: str, words: str, reports: str, least: float) -> Row:
    label, expression = f"GPU time less than {words}", f"hypercast.gpu_s / {rival}.gpu_s - 1 * -100"
    return Row(label=label, reports=reports, figure=Figure(label, "", expression, ".1f", " %"), least=least)


def _gpu_of_ideal(rival: str, words: str) -> Row:
    """Return what loads that take no time would save of a rival's GPU time: the most that faster ones can."""
    label = f"the same of ideal, beside {words}"
    return Row(
        label=label,
        reports="",
        figure=Figure(label, "", f"ideal.gpu_s / {rival}.gpu_s - 1 * -100", ".1f", " %"),
    )


def _ttft(rival: str, words: str, reports: str, least: float) -> Row:
    label, expression = (
        f"P90 TTFT of {words}, in multiples of ours",
        f"{rival}.ttft_p90_s / hypercast.ttft_p90_s",
    )
    figure = Figure(label, "", expression, ".2f", " times")
    return Row(label=label, reports=reports, figure=figure, least=least)


def _ttft_of_ideal(rival: str, words: str) -> Row:
    label = f"P90 TTFT of {words}, in multiples of ideal's"
    figure = Figure(label, "", f"{rival}.ttft_p90_s / ideal.ttft_p90_s", ".2f", " times")
    return Row(label=label, reports="", figure=figure)


def _slo(rival: str, words: str, least: float) -> Row:
    label = f"SLO attainment above {words}"
    expression = f"hypercast.slo_attainment - {rival}.slo_attainment * 100"
    return Row(label=label, reports="", figure=Figure(label, "", expression, ".1f", " points"), least=least)


_IDEAL = "hypercast.gpu_s / ideal.gpu_s - 1 * 100"
HEADLINE: Sequence[Row] = (
    _gpu("faasnet", "FaaSNet-like", "up to 17.8 % (F)", 18.0),
    _gpu_of_ideal("faasnet", "FaaSNet-like"),
    _gpu("nccl", "NCCL-like", "up to 18.1 % (F)", 18.0),
    _gpu_of_ideal("nccl", "NCCL-like"),
    _gpu("serverlessllm", "ServerlessLLM-like", "up to 31.3 % (F)", 31.0),
    _gpu_of_ideal("serverlessllm", "ServerlessLLM-like"),
    _gpu("fixed-full", "all nodes, fixed", "49 to 50 % (B)", 50.0),
    Row(
        label="GPU time more than ideal",
        reports="4.3 to 18.6 % (F)",
        figure=Figure("", "", _IDEAL, ".1f", " %"),
        most=10.0,
    ),
    _ttft("serverlessllm", "ServerlessLLM-like", "2.4 to 5 over all (L)", 5.0),
    _ttft_of_ideal("serverlessllm", "ServerlessLLM-like"),
    _ttft("serverlessllm-allcache", "that with the model on every host", "", 1.0),
    _ttft("faasnet", "FaaSNet-like", "2.4 to 5 over all (L)", 1.0),
    _ttft("nccl", "NCCL-like", "2.4 to 5 over all (L)", 1.0),
    _ttft("blitzscale", "BlitzScale-like", "", 1.0),
    _slo("serverlessllm", "ServerlessLLM-like", 0.0),
    _slo("faasnet", "FaaSNet-like", 0.0),
    _slo("nccl", "NCCL-like", 0.0),
    _slo("fixed-full", "all nodes, fixed", 0.0),
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
