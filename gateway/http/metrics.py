"""Prometheus metrics; labels are functions, versions, kinds, codes and some tenants; no ids, no keys."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.cluster.cast_tracker import CastEnded
from gateway.core.node_demand import NodeDemand
from gateway.core.open_call import OpenCall
from gateway.http.collectors import FunctionRows, LabelledHistogram, Tallied, TalliedRows
from gateway.http.held_requests import HeldRequests
from gateway.http.job_metrics import JobMetrics
from gateway.http.tenant_metrics import TenantMetrics
from gateway.http.vllm_metrics import GenerationLoad, VllmMetrics
from registry.clock import Clock, SystemClock
from registry.records.change import Snapshot
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.usage import RequestRecord, RequestStatus

_BY_TRANSPORT = "cast_recv_bytes_"  # nodes count what they received, by transport
_NODE_GAUGES = {
    "rdma_quarantined_bytes": "Memory that a node's RDMA device refused to release.",
    "images_verified": "Images that a node found to match their SHA-256, since its start.",
    "images_rejected": "Images that a node dropped, forged or damaged, since its start.",
}

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NANOS = 10**9
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_START_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFacts:
    """Figures of the control side: those of all gateways, and those of the controlling one.

    `generation` are this gateway's calls by function. Only the controlling gateway has `desired`, by
    `NAME:VERSION`, and `nodes`.
    """

    failovers: int
    moved: int
    desired: Mapping[str, int]
    nodes: tuple[NodeDemand, ...] = ()
    generation: Mapping[str, GenerationLoad] = field(default_factory=dict)


class Metrics:
    """The metrics of one gateway, in a registry of its own: two gateways may run in one process."""

    def __init__(
        self,
        view: Callable[[], Snapshot],
        control: Callable[[], ControlFacts] | None = None,
        *,
        clock: Clock | None = None,
        archive_lag_s: Callable[[], float | None] = lambda: None,
        vllm_names: bool = False,
        tenants: int = 0,
    ) -> None:
        """Register all metrics; `archive_lag_s` returns None if another gateway archives the ledger.

        With `vllm_names` functions that generate have vLLM's metrics, too. So many `tenants` have rows.
        """
        self.registry = registry = CollectorRegistry(auto_describe=False)
        labels = ("function", "version", "start_kind", "code")
        self.requests: Tally[tuple[str, ...]] = Tally()  # by `labels`
        self.duration = LabelledHistogram(
            "hypercast_request_duration_seconds",
            "From the request's arrival to its last byte.",
            ("function",),
            _LATENCY_S,
        )
        self.first_token = LabelledHistogram(
            "hypercast_time_to_first_token_seconds",
            "From the start of a call to its first output.",
            ("function", "start_kind"),
            _LATENCY_S,
        )
        self.per_token = LabelledHistogram(
            "hypercast_time_per_output_token_seconds",
            "Mean time between output tokens of a request.",
            ("function",),
            _TOKEN_S,
        )
        self.cold_starts: Tally[tuple[str, ...]] = Tally()  # by function
        self.held = HeldRequests(clock or SystemClock())
        self.phases = LabelledHistogram(
            "hypercast_init_duration_seconds",
            "Length of each phase of an instance's start.",
            ("function", "stage"),
            _START_S,
        )
        self.casts = LabelledHistogram(
            "hypercast_cast_duration_seconds",
            "From the plan of a cast to the end of its last target.",
            ("function", "state"),
            _START_S,
        )
        self.tokens: Tally[tuple[str, ...]] = Tally()  # by function and kind
        self.gpu_ms: Tally[tuple[str, ...]] = Tally()  # by function
        self.cost_nanos: Tally[tuple[str, ...]] = Tally()  # by function
        self.refused_changes: Tally[tuple[str, ...]] = Tally()  # by status
        self.shadows: Tally[tuple[str, ...]] = Tally()  # by function and outcome
        self.outbox_records = Gauge(
            "hypercast_outbox_records",
            "Records of failed requests that wait in the outbox for the ledger.",
            registry=registry,
        )
        self.loop_lag = LabelledHistogram(
            "hypercast_event_loop_lag_seconds",
            "How much later than due the event loop ran a timer, measured every 50 ms.",
            (),
            _LAG_S,
        )
        registry.register(_ClusterCollector(view, control, self.held, archive_lag_s))
        latencies = (self.duration, self.first_token, self.per_token, self.phases, self.casts, self.loop_lag)
        for collector in latencies:
            registry.register(collector)
        registry.register(
            Tallied(
                "hypercast_cold_starts",
                "Requests that waited for a cold start.",
                ("function",),
                self.cold_starts,
            )
        )
        for counter in self._billed():
            registry.register(counter)
        self.jobs = JobMetrics(registry)
        self.tenants = TenantMetrics(registry, tenants) if tenants else None
        self._vllm = None
        if vllm_names:
            loads = (lambda: control().generation) if control is not None else dict[str, GenerationLoad]
            self._vllm = VllmMetrics(registry, view, loads)
        self._view = view
        tallies = (self.requests, self.cold_starts, self.tokens, self.gpu_ms, self.cost_nanos, self.shadows)
        self._by_function: tuple[FunctionRows, ...] = (
            *(self.duration, self.first_token, self.per_token, self.phases, self.casts),
            *map(TalliedRows, tallies),
            *(self._vllm.rows if self._vllm is not None else ()),
        )
        self._absent: set[str] = set()
        registry.register(
            Tallied(
                "hypercast_refused_changes",
                "Attempts of changes without a valid key (401) or without the right (403).",
                ("status",),
                self.refused_changes,
            )
        )
        registry.register(
            Tallied(
                "hypercast_shadow_requests",
                "Copies of requests to versions in a rollout: ok, failed, or dropped for lack of room.",
                ("function", "outcome"),
                self.shadows,
            )
        )
        registry.register(Tallied("hypercast_requests", "Requests by outcome.", labels, self.requests))

    def note_start(self, instance: InstanceRecord) -> None:
        """Count the phases of an instance's start, once it is ready."""
        for stage, length_ms in instance.phases_ms.items():
            self.phases.observe((instance.function, stage), length_ms / 1000)

    def note_cast(self, end: CastEnded) -> None:
        """Count a cast that has ended."""
        self.casts.observe((end.record.function, end.state), end.seconds)

    def note_call(self, function: str, start_kind: str, call: OpenCall, status: RequestStatus) -> None:
        """Count the times of a call that ends now."""
        if (first_s := call.first_output_after_s) is not None:
            self.first_token.observe((function, start_kind), first_s)
        if call.tokens > 1 and (gap_s := call.token_gap_s) is not None:
            self.per_token.observe((function,), gap_s)
        if self._vllm is not None:
            self._vllm.note_call(function, call, status)

    def note_billed(self, record: RequestRecord) -> None:
        """Count what a request has used, once its record is in the ledger."""
        function = record.function
        self.tokens[function, "prompt"] += record.prompt_tokens
        self.tokens[function, "completion"] += record.completion_tokens
        self.gpu_ms[function,] += record.billed_gpu_ms
        self.cost_nanos[function,] += record.cost_nanos
        if self._vllm is not None:
            self._vllm.note_tokens(function, record.prompt_tokens, record.completion_tokens)
        if self.tenants is not None:
            self.tenants.note(record)

    def _billed(self) -> tuple[Tallied, ...]:
        return (
            Tallied(
                "hypercast_tokens",
                "Tokens of billed requests.",
                ("function", "kind"),
                self.tokens,
            ),
            Tallied(
                "hypercast_request_gpu_seconds",
                "Accelerator time of billed requests.",
                ("function",),
                self.gpu_ms,
                parts=1000,
            ),
            Tallied(
                "hypercast_cost",
                "Cost of billed requests, in the unit of the price table's currency.",
                ("function",),
                self.cost_nanos,
                parts=NANOS,
            ),
        )

    def render(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        self._forget_deleted()
        return generate_latest(self.registry)

    def _forget_deleted(self) -> None:
        """Drop the rows of functions that do not exist, and did not at the scrape before either.

        So a function of which the cluster's view is not aware yet keeps its own.
        """
        known = {function.name for function in self._view().functions} | {""}
        absent = set().union(*(rows.functions() for rows in self._by_function)) - known
        for rows in self._by_function:
            rows.forget(absent & self._absent)
        self.held.forget_except(known)
        self._absent = absent


class _ClusterCollector:
    """Gauges and counters of the cluster's view and of held requests, read at the time of the scrape."""

    def __init__(
        self,
        view: Callable[[], Snapshot],
        control: Callable[[], ControlFacts] | None,
        held: HeldRequests,
        archive_lag_s: Callable[[], float | None],
    ) -> None:
        self._view = view
        self._control = control
        self._held = held
        self._archive_lag_s = archive_lag_s

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        instances = GaugeMetricFamily(
            "hypercast_instances", "Instances by state.", labels=("function", "state")
        )
        counts: Tally[tuple[str, str]] = Tally()
        for instance in view.instances:
            counts[instance.function, instance.state] += instance.takes_calls
        for function in view.functions:
            for state in (InstanceState.STARTING, InstanceState.LOADING, InstanceState.READY):
                counts[function.name, state] += 0
        for key, count in sorted(counts.items()):
            instances.add_metric(key, count)
        nodes = GaugeMetricFamily("hypercast_nodes", "Nodes by state.", labels=("state",))
        for state_name, count in sorted(Tally(str(up.record.state) for up in view.nodes).items()):
            nodes.add_metric((state_name,), count)
        yield instances
        yield nodes
        yield from _held(self._held)
        yield _archive_lag(self._archive_lag_s())
        yield _live(view)
        yield from _node_counters(view)
        yield _gpu_seconds(view)
        if self._control is not None:
            yield from _control(self._control())


def _held(held: HeldRequests) -> Iterator[Metric]:
    counts = GaugeMetricFamily(
        "hypercast_held_requests", "Requests waiting for an instance.", labels=("function",)
    )
    ages = GaugeMetricFamily(
        "hypercast_oldest_held_request_seconds",
        "How long the oldest of them has waited.",
        labels=("function",),
    )
    for name, count, age_s in held.rows():
        counts.add_metric((name,), count)
        ages.add_metric((name,), age_s)
    yield counts
    yield ages


def _archive_lag(lag_s: float | None) -> Metric:
    family = GaugeMetricFamily(
        "hypercast_ledger_archive_lag_seconds",
        "How long closed days of the ledger have waited in Redis for the archive.",
        labels=(),
    )
    if lag_s is not None:
        family.add_metric((), lag_s)
    return family


def _live(view: Snapshot) -> Metric:
    family = GaugeMetricFamily(
        "hypercast_live_pipelines",
        "Pipelines of nodes that serve while loading.",
        labels=("function", "version"),
    )
    for change in view.live:
        family.add_metric((change.record.function, str(change.record.version)), len(change.record.pipelines))
    return family


def _node_counters(view: Snapshot) -> Iterator[Metric]:
    disk = CounterMetricFamily(
        "hypercast_disk_read_bytes",
        "Bytes of images that nodes read from disk or the store.",
        labels=("node",),
    )
    disk_cache = CounterMetricFamily(
        "hypercast_disk_cache_read_bytes",
        "Bytes of images that nodes read from their disk tier.",
        labels=("node",),
    )
    casts = CounterMetricFamily(
        "hypercast_cast_bytes",
        "Bytes of images that nodes received from other nodes.",
        labels=("node", "transport"),
    )
    for up in view.nodes:
        node, counters = up.record.id, up.record.counters
        if "disk_read_bytes" in counters:
            disk.add_metric((node,), counters["disk_read_bytes"])
        if "disk_cache_read_bytes" in counters:
            disk_cache.add_metric((node,), counters["disk_cache_read_bytes"])
        for counter, nbytes in counters.items():
            if counter.startswith(_BY_TRANSPORT):
                casts.add_metric((node, counter.removeprefix(_BY_TRANSPORT)), nbytes)
    yield disk
    yield disk_cache
    yield casts
    for name, what in _NODE_GAUGES.items():
        gauge = GaugeMetricFamily(f"hypercast_{name}", what, labels=("node",))
        for up in view.nodes:
            if name in up.record.counters:
                gauge.add_metric((up.record.id,), up.record.counters[name])
        yield gauge


def _gpu_seconds(view: Snapshot) -> Metric:
    family = CounterMetricFamily(
        "hypercast_gpu_seconds", "Accelerator time while instances were present.", labels=("kind", "node")
    )
    for up in view.nodes:
        for kind in ("busy", "loading", "idle"):
            if (spent_us := up.record.counters.get(f"{kind}_us")) is not None:
                family.add_metric((kind, up.record.id), spent_us / 1e6)
    return family


def _control(facts: ControlFacts) -> Iterator[Metric]:
    failovers = CounterMetricFamily(
        "hypercast_failovers", "Requests that moved to another node after a failure."
    )
    failovers.add_metric((), facts.failovers)
    moved = CounterMetricFamily(
        "hypercast_live_moves", "Requests that a pipeline or an instance handed to another instance."
    )
    moved.add_metric((), facts.moved)
    desired = GaugeMetricFamily(
        "hypercast_desired_instances",
        "Instances that the autoscaler aims for.",
        labels=("function", "version"),
    )
    for key, count in sorted(facts.desired.items()):
        function, _, version = key.rpartition(":")
        desired.add_metric((function, version), count)
    yield failovers
    yield moved
    yield desired
    yield from _nodes(facts.nodes)


def _nodes(demands: Iterable[NodeDemand]) -> Iterator[Metric]:
    labels = ("gpus", "handlers")
    wanted = GaugeMetricFamily(
        "hypercast_nodes_wanted",
        "Nodes that the platform has work for: those it lacks included, those it could give back not.",
        labels=labels,
    )
    lacking = GaugeMetricFamily(
        "hypercast_nodes_lacking",
        "Nodes that the platform lacks for instances without a place.",
        labels=labels,
    )
    for demand in demands:
        row = (str(demand.pool.gpus), "true" if demand.pool.handlers else "false")
        wanted.add_metric(row, demand.wanted)
        lacking.add_metric(row, demand.lacking)
    yield wanted
    yield lacking
