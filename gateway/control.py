"""The routing and scaling side of one gateway, put together: what `python -m gateway` opens."""

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gateway.admission import Admission, AdmissionLimits
from gateway.cast_records import CastRecords
from gateway.casts import Casts
from gateway.cluster import ClusterControl
from gateway.contract import Blobs
from gateway.controller import Controller, LocalDemand
from gateway.demand import DemandPublisher
from gateway.directory import Directory, VersionKey
from gateway.dispatcher import CallDispatcher, DispatchSettings
from gateway.fixed_plan import FixedPlan
from gateway.leadership import TTL_S as LEASE_TTL_S
from gateway.leadership import Leadership
from gateway.live import LiveServing
from gateway.live_board import LiveBoard
from gateway.live_moves import LiveMoves
from gateway.measured_links import MeasuredLinks
from gateway.node_calls import NodeCalls
from gateway.node_client import Dial
from gateway.nodes import NodeLinks
from gateway.plan import PlannerSettings
from gateway.planner import Planner
from gateway.policy import ConcurrencyTarget, ScalerPolicy
from gateway.progress import StartProgress
from gateway.replicator import Replicator
from gateway.settlement import Settlement
from gateway.start_assets import StartAssets
from gateway.sync import DirectorySync
from gateway.wakeup import Wakeup
from registry.clock import Clock, SystemClock
from registry.state import ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """How this side of a gateway behaves. `cast_plan` is for experiments: else each cast gets its own.
    `link_bytes_s` is what links are taken for that no cast has measured."""

    lease_ttl_s: float = LEASE_TTL_S
    demand_ttl_s: float = 10.0
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    cast_plan: FixedPlan | None = None
    link_bytes_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStats:
    """For metrics. `desired` is empty on a gateway that is not the controller."""

    controller_epoch: int | None
    state_alive: bool
    held: int
    in_flight: int
    failovers: int
    rerouted: int
    moved: int
    desired: Mapping[str, int]
    instances: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """`ready` is set once the cluster's state has been read."""

    dispatcher: CallDispatcher
    cluster: ClusterControl
    directory: Directory
    changes: Wakeup
    ready: asyncio.Event
    settlement: Settlement
    _sync: DirectorySync
    _leadership: Leadership
    _controller: Controller
    _admission: Admission

    def __repr__(self) -> str:
        return f"<Control {self._leadership!r} {self.directory!r}>"

    async def drain(self) -> None:
        """Refuse new calls; return once those under way are over."""
        await self.dispatcher.drain()

    def stats(self) -> ControlStats:
        """What is going on now (no I/O)."""
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
            instances=Counter(instance.state.value for instance in self.directory.instances()),
        )


@asynccontextmanager
async def make_control(
    *,
    state: ClusterState,
    blobs: Blobs,
    dial: Dial,
    gateway_id: str,
    clock: Clock | None = None,
    settings: ControlSettings | None = None,
    policy: ScalerPolicy | None = None,
    rng: random.Random | None = None,
) -> AsyncIterator[Control]:
    """Open the control side; its tasks live until the context is left.

    Leaving cancels what is under way: `drain` first. `dial` comes from `gateway.dialing.channel_dial`.
    """
    clock, settings = clock or SystemClock(), settings or ControlSettings()
    directory, changes, work = Directory(MeasuredLinks(settings.link_bytes_s)), Wakeup(), Wakeup()
    admission, progress = Admission(settings.limits), StartProgress()
    links = NodeLinks(directory, changes, dial)
    settlement = Settlement(links)
    sync = DirectorySync(state, directory, changes, clock)
    demand = DemandPublisher(state, admission, gateway_id, ttl_s=settings.demand_ttl_s)
    planner = Planner(policy or ConcurrencyTarget(), _instance_id, settings.planner)
    assets = StartAssets(blobs)
    calls = NodeCalls(links, directory, assets, CastRecords(state))
    casts = Casts(fixed=settings.cast_plan)
    leadership = Leadership(state, gateway_id, changes, clock, ttl_s=settings.lease_ttl_s)
    dispatcher = CallDispatcher(
        directory,
        changes,
        links,
        progress,
        admission,
        demand,
        work,
        clock,
        rng=rng,
        settings=settings.dispatch,
    )
    board = LiveBoard(state, directory, changes, clock, lambda: leadership.epoch)
    live = LiveServing(directory, links, assets, board)
    moves = LiveMoves(directory, changes, links, dispatcher.live_calls, dispatcher.slots)
    controller = Controller(
        state,
        directory,
        sync,
        changes,
        work,
        leadership,
        planner,
        Replicator(planner),
        casts,
        live,
        calls,
        LocalDemand(gateway_id=gateway_id, admission=admission, slots=dispatcher.slots),
        progress,
        clock,
    )
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(part.run(), name=f"control {type(part).__name__}")
            for part in (sync, links, demand, leadership, live, moves, controller, settlement)
        ]
        try:
            yield Control(
                dispatcher=dispatcher,
                cluster=ClusterControl(state, directory, changes, planner, casts, calls, clock),
                directory=directory,
                changes=changes,
                ready=sync.ready,
                settlement=settlement,
                _sync=sync,
                _leadership=leadership,
                _controller=controller,
                _admission=admission,
            )
        finally:
            await asyncio.shield(settlement.flush())
            for task in tasks:
                task.cancel()
            await asyncio.shield(demand.close())


def _instance_id(key: VersionKey) -> str:
    return f"{key.function}-{key.version}-{secrets.token_hex(4)}"
