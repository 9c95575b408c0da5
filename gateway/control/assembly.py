"""Assembly of the routing and scaling side of one gateway."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from gateway.billing.ack_batcher import AckBatcher
from gateway.cluster.backoff import BackoffTable
from gateway.cluster.condition import ChangeCondition
from gateway.cluster.context import ClusterContext
from gateway.cluster.link_rates import LinkRateCache
from gateway.cluster.node_channels import NodeChannels
from gateway.cluster.node_client import Dial
from gateway.cluster.start_assets import StartAssets
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.cluster.sync import ClusterStateSync
from gateway.control.cluster_operations import ClusterControl
from gateway.control.context import LocalLoad, Planners
from gateway.control.controller import Controller
from gateway.control.daily_archive import DailyArchive
from gateway.control.decisions import DecisionPublisher
from gateway.control.leadership import TTL_S as LEASE_TTL_S
from gateway.control.leadership import Leadership
from gateway.control.node_calls import NodeCalls
from gateway.control.node_loads import NodeLoadFollower
from gateway.control.rollout_control import RolloutControl
from gateway.core.audit_writer import AuditWriter
from gateway.core.fixed_plan import FixedPlan
from gateway.core.node_demand import NodeDemand
from gateway.dispatch.admission import Admission, AdmissionLimits
from gateway.dispatch.call_mover import CallMover
from gateway.dispatch.demand import DemandPublisher
from gateway.dispatch.dispatcher import CallDispatcher, DispatchSettings
from gateway.dispatch.progress import StartProgress
from gateway.dispatch.tokenizers import TokenizerSender
from gateway.http.vllm_metrics import GenerationLoad
from gateway.live.coordinator import LiveCoordinator
from gateway.live.publisher import LiveStatePublisher
from gateway.planning.cast_planner import CastPlanner
from gateway.planning.cast_publisher import CastPublisher
from gateway.planning.load_target import PolicyBySetting
from gateway.planning.outlook import CapacityTable
from gateway.planning.plan import PlannerSettings
from gateway.planning.planner import ScalingPlanner
from gateway.planning.policy import ScalerPolicy
from gateway.planning.replicator import Replicator
from gateway.planning.rollout_monitor import RolloutMonitor
from rdmacast.protocol.handshake import Secret
from registry.clock import Clock, SystemClock
from registry.config.function_secrets import SecretVault
from registry.images.store import Blobs
from registry.records.change import VersionLoad
from registry.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Settings of the control side.

    `cast_plan` forces one planner on all casts, for experiments. `link_bytes_s` is the assumed rate of links
    that no cast has measured. `served_copies_bytes` is each host's memory for copies of what its accelerators
    serve. With `moves_on_drain` running generations leave instances that are to stop. `cluster_secret`
    decrypts the secrets of functions.
    """

    lease_ttl_s: float = LEASE_TTL_S
    demand_ttl_s: float = 10.0
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    cast_plan: FixedPlan | None = None
    link_bytes_s: float | None = None
    served_copies_bytes: int = 0
    moves_on_drain: bool = True
    cluster_secret: Secret = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStats:
    """Figures for metrics; `desired` is empty on a gateway that is not the controller."""

    controller_epoch: int | None
    state_alive: bool
    held: int
    in_flight: int
    failovers: int
    rerouted: int
    moved: int
    desired: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The open control side."""

    dispatcher: CallDispatcher
    cluster: ClusterControl
    state_cache: ClusterStateCache
    changes: ChangeCondition
    settlement: AckBatcher
    _sync: ClusterStateSync
    _leadership: Leadership
    _controller: Controller
    _admission: Admission
    _capacities: CapacityTable

    def __repr__(self) -> str:
        return f"<Control {self._leadership!r} {self.state_cache!r}>"

    @property
    def ready(self) -> asyncio.Event:
        """Set once the cluster's state has been read."""
        return self._sync.ready

    @property
    def leads(self) -> bool:
        """Whether this gateway holds the controller lease."""
        return self._leadership.epoch is not None

    async def drain(self) -> None:
        """Refuse new calls; return once those in progress have ended."""
        await self.dispatcher.drain()

    def stats(self) -> ControlStats:
        """Return the current figures (no I/O)."""
        counts = self.dispatcher.counts
        return ControlStats(
            controller_epoch=self._leadership.epoch,
            state_alive=self._sync.alive,
            held=self._admission.held,
            in_flight=self._admission.calls - self._admission.held,
            failovers=counts.failovers,
            rerouted=counts.rerouted,
            moved=counts.moved,
            desired={str(key): desired for key, desired in self._controller.desired.items()},
        )

    def node_demands(self) -> tuple[NodeDemand, ...]:
        """Return how many nodes each pool has, lacks and does not need; none while another gateway leads."""
        return self._controller.node_demands()

    def generation_loads(self) -> dict[str, GenerationLoad]:
        """Return this gateway's calls by function; nodes report their KV caches to the leading one alone."""
        usage = self._capacities.kv_usage(self.state_cache.instance)
        found = {name: GenerationLoad(kv_usage=share) for name, share in usage.items()}
        for load in self._admission.loads():
            found[load.function] = _with_calls(found.get(load.function, GenerationLoad()), load)
        return found


def _with_calls(before: GenerationLoad, load: VersionLoad) -> GenerationLoad:
    """Return the load with the calls of one version."""
    return replace(before, running=before.running + load.in_flight, waiting=before.waiting + load.held)


MakeDailyArchive = Callable[[Leadership], DailyArchive]


@asynccontextmanager
async def make_control(
    *,
    state: State,
    blobs: Blobs,
    dial: Dial,
    gateway_id: str,
    clock: Clock | None = None,
    settings: ControlSettings | None = None,
    policy: ScalerPolicy | None = None,
    daily_archive: MakeDailyArchive | None = None,
) -> AsyncIterator[Control]:
    """Open the control side; its tasks run until the context is left.

    Leaving cancels calls in progress: `drain` first. `dial` comes from `gateway.cluster.dialer.channel_dial`.
    `daily_archive` is the archive's loop, which works while this gateway leads.
    """
    settings = settings or ControlSettings()
    cluster = _make_cluster(state, clock or SystemClock(), settings)
    audit = AuditWriter(state, cluster.clock, gateway_id)
    parts = _assemble(cluster, audit, blobs, dial, settings, policy or PolicyBySetting(), daily_archive)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(part.run(), name=f"control {type(part).__name__}") for part in parts.running
        ]
        try:
            yield parts.control
        finally:
            await asyncio.shield(parts.control.settlement.flush())
            for task in tasks:
                task.cancel()
            await asyncio.shield(parts.loads.close())


class _Running(Protocol):
    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The control side, and those of its parts that run as tasks."""

    control: Control
    running: tuple[_Running, ...]
    loads: DemandPublisher


def _make_cluster(state: State, clock: Clock, settings: ControlSettings) -> ClusterContext:
    changes = ChangeCondition()
    backoff = BackoffTable(first_s=settings.planner.backoff_s, max_s=settings.planner.max_backoff_s)
    state_cache = ClusterStateCache(LinkRateCache(settings.link_bytes_s), backoff)
    sync = ClusterStateSync(state, state_cache, changes, clock)
    return ClusterContext(state=state, state_cache=state_cache, sync=sync, changes=changes, clock=clock)


def _assemble(
    cluster: ClusterContext,
    audit: AuditWriter,
    blobs: Blobs,
    dial: Dial,
    settings: ControlSettings,
    policy: ScalerPolicy,
    daily_archive: MakeDailyArchive | None,
) -> _Parts:
    state, state_cache, changes, clock = cluster.state, cluster.state_cache, cluster.changes, cluster.clock
    gateway_id = audit.gateway
    admission = Admission(settings.limits, state_cache.judged_versions)
    progress, work = StartProgress(), ChangeCondition()
    channels = NodeChannels(state_cache, changes, dial)
    settlement = AckBatcher(channels)
    loads = DemandPublisher(state, admission, gateway_id, ttl_s=settings.demand_ttl_s)
    leadership = Leadership(
        state, gateway_id, changes, clock, ttl_s=settings.lease_ttl_s, seen=lambda: state_cache.fence
    )
    assets = StartAssets(blobs)
    tokenizers = TokenizerSender(channels, assets)
    dispatcher = CallDispatcher(
        cluster, channels, progress, admission, loads, work, tokenizers, settings=settings.dispatch
    )
    vault = SecretVault(state, settings.cluster_secret)
    calls = NodeCalls(channels, state_cache, assets, CastPublisher(state), vault)
    publisher = LiveStatePublisher(state, state_cache, changes, clock, lambda: leadership.epoch)
    live = LiveCoordinator(state_cache, channels, assets, publisher, clock)
    planners = _make_planners(cluster, settings, policy, live, RolloutMonitor(gateway_id))
    local = LocalLoad(gateway_id=gateway_id, admission=admission, slots=dispatcher.slots, progress=progress)
    decisions = DecisionPublisher(state)
    rollouts = RolloutControl(cluster, planners.rollouts, audit)
    controller = Controller(cluster, planners, local, calls, leadership, work, decisions, rollouts)
    moves = CallMover(
        *(state_cache, changes, channels, dispatcher.movable_calls, dispatcher.slots),
        empties=settings.moves_on_drain,
    )
    control = Control(
        dispatcher=dispatcher,
        cluster=ClusterControl(cluster, planners, calls, dispatcher.traffic),
        state_cache=state_cache,
        changes=changes,
        settlement=settlement,
        _sync=cluster.sync,
        _leadership=leadership,
        _controller=controller,
        _admission=admission,
        _capacities=planners.scaling.outlook.capacities,
    )
    node_loads = NodeLoadFollower(cluster, channels, leadership, planners.scaling.outlook.capacities, work)
    running: list[_Running] = [cluster.sync, channels, loads, leadership, planners.live, moves, controller]
    running += [node_loads, decisions]
    running.append(settlement)
    if daily_archive is not None:
        running.append(daily_archive(leadership))
    return _Parts(control=control, running=tuple(running), loads=loads)


def _make_planners(
    cluster: ClusterContext,
    settings: ControlSettings,
    policy: ScalerPolicy,
    live: LiveCoordinator,
    rollouts: RolloutMonitor,
) -> Planners:
    scaling = ScalingPlanner(policy, _instance_id, settings.planner, cluster.state_cache.backoff)
    cluster.state_cache.subscribe_ready(scaling.outlook.times.on_ready)
    casts = CastPlanner(fixed=settings.cast_plan)
    replicator = Replicator(scaling, settings.served_copies_bytes)
    return Planners(scaling=scaling, replicator=replicator, casts=casts, live=live, rollouts=rollouts)


def _instance_id(key: VersionKey) -> str:
    return f"{key.function}-{key.version}-{secrets.token_hex(4)}"
