"""Metrics of functions that generate by the names and labels of vLLM, which dashboards and routers read.

A function is a model, and each gateway one engine. Names, labels and bounds are those of vLLM 0.11 and later;
`time_per_output_token_seconds` is its earlier name for the latency between tokens.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.core.open_call import OpenCall
from gateway.http.collectors import FunctionRows, LabelledHistogram, Tallied, TalliedRows
from registry.messages.forward import ForwardRequest
from registry.messages.node import Generate
from registry.records.change import Snapshot
from registry.records.function import FunctionTask
from registry.records.usage import RequestStatus

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(part * 10**power) for power in range(6) for part in (1, 2, 5))
_REASONS = {RequestStatus.CANCELLED: "abort", RequestStatus.FAILED: "error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLoad:
    """A function's calls at one gateway; `kv_usage` is the used share of its KV caches (None: unknown)."""

    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None


class VllmMetrics:
    """The metrics of one gateway by vLLM's names; `loads` returns its calls by function."""

    def __init__(
        self,
        registry: CollectorRegistry,
        view: Callable[[], Snapshot],
        loads: Callable[[], Mapping[str, GenerationLoad]],
    ) -> None:
        self._prompt: Tally[tuple[str, ...]] = Tally()
        self._generated: Tally[tuple[str, ...]] = Tally()
        self._ended: Tally[tuple[str, ...]] = Tally()  # by `_LABELS` and reason
        self._first_token = _histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S)
        self._gap = _histogram("inter_token_latency_seconds", "Time between output tokens.", _GAP_S)
        self._mean_gap = _histogram(
            "request_time_per_output_token_seconds", "Mean time between output tokens of a request.", _GAP_S
        )
        self._whole = _histogram("e2e_request_latency_seconds", "From a call's begin to its end.", _REQUEST_S)
        self._queued = _histogram("request_queue_time_seconds", "Wait for an instance.", _REQUEST_S)
        self._ran = _histogram("request_inference_time_seconds", "Time on an instance.", _REQUEST_S)
        self._prefilled = _histogram(
            "request_prefill_time_seconds", "On an instance until the first output.", _REQUEST_S
        )
        self._decoded = _histogram(
            "request_decode_time_seconds", "On an instance after the first output.", _REQUEST_S
        )
        self._prompts = _histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._outputs = _histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        histograms = (
            *(self._first_token, self._gap, self._mean_gap, self._whole, self._queued),
            *(self._ran, self._prefilled, self._decoded, self._prompts, self._outputs),
        )
        tallies = (self._prompt, self._generated, self._ended)
        self.rows: tuple[FunctionRows, ...] = (*histograms, *map(TalliedRows, tallies))
        for collector in (
            _Gauges(view, loads),
            *histograms,
            _Renamed(self._gap, "vllm:time_per_output_token_seconds"),
            Tallied("vllm:prompt_tokens", "Prompt tokens run.", _LABELS, self._prompt),
            Tallied("vllm:generation_tokens", "Output tokens generated.", _LABELS, self._generated),
            Tallied(
                "vllm:request_success",
                "Calls by how they ended.",
                (*_LABELS, "finished_reason"),
                self._ended,
            ),
        ):
            registry.register(collector)

    def note_call(self, function: str, call: OpenCall, status: RequestStatus) -> None:
        """Count the times of a call that ends now, if it generates."""
        if not isinstance(call.call.work, Generate | ForwardRequest):
            return
        labels = function, _ENGINE
        self._ended[*labels, _REASONS.get(status) or call.finish_reason or "stop"] += 1
        self._whole.observe(labels, call.took_s)
        queued_s, first_s = call.assigned_after_s, call.first_output_after_s
        if first_s is not None:
            self._first_token.observe(labels, first_s)
        if queued_s is not None:
            self._queued.observe(labels, queued_s)
            self._ran.observe(labels, call.took_s - queued_s)
            if first_s is not None:
                self._prefilled.observe(labels, first_s - queued_s)
                self._decoded.observe(labels, call.took_s - first_s)
        if (gap_s := call.token_gap_s) is not None:
            self._gap.observe(labels, gap_s, call.tokens - 1)
            self._mean_gap.observe(labels, gap_s)

    def note_tokens(self, function: str, prompt: int, generated: int) -> None:
        """Count the tokens of a request; one without any generates nothing."""
        if not generated:
            return
        labels = function, _ENGINE
        self._prompt[labels] += prompt
        self._generated[labels] += generated
        self._prompts.observe(labels, prompt)
        self._outputs.observe(labels, generated)


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> LabelledHistogram:
    return LabelledHistogram(f"vllm:{name}", text, _LABELS, bounds)


class _Renamed:
    """The rows of a histogram under a second name."""

    def __init__(self, histogram: LabelledHistogram, name: str) -> None:
        self._histogram, self._name = histogram, name

    def collect(self) -> Iterator[Metric]:
        yield self._histogram.family(self._name)


class _Gauges:
    """The calls of functions that generate and the use of their KV caches, read at the time of the scrape."""

    def __init__(
        self, view: Callable[[], Snapshot], loads: Callable[[], Mapping[str, GenerationLoad]]
    ) -> None:
        self._view, self._loads = view, loads

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Calls on instances.", labels=_LABELS)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting", "Calls that wait for an instance.", labels=_LABELS
        )
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Used share of the KV caches; 1 is all of it.", labels=_LABELS
        )
        loads, idle = self._loads(), GenerationLoad()
        generates = {one.function for one in self._view().versions if one.task is FunctionTask.GENERATE}
        for name in sorted(generates):
            load = loads.get(name, idle)
            running.add_metric((name, _ENGINE), load.running)
            waiting.add_metric((name, _ENGINE), load.waiting)
            if load.kv_usage is not None:
                usage.add_metric((name, _ENGINE), load.kv_usage)
        yield running
        yield waiting
        yield usage
