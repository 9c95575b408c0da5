"""The control loop: directory and demand to a plan, the plan to calls on nodes. Acts only with the lease."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from math import inf

from gateway.actions import Action, DropFrom, FetchVersion, GiveUp, StartOn, StopOn, UnkeepOn, WarmOn
from gateway.admission import Admission
from gateway.casts import Casts
from gateway.directory import Directory, VersionKey
from gateway.leadership import Leadership
from gateway.live import LiveServing
from gateway.node_calls import NodeCalls, SourceGone
from gateway.plan import KeyDemand, Plan
from gateway.planner import Planner
from gateway.progress import StartProgress
from gateway.replicator import Replicator
from gateway.rising import Rising, settle_s
from gateway.router import Slots
from gateway.sync import DirectorySync
from gateway.wakeup import Wakeup
from registry.clock import Clock
from registry.errors import ChannelClosed, RegistryError, RemoteError
from registry.function import FunctionVersion
from registry.instance import InstanceRecord, InstanceState, StartKind
from registry.node import NodeState
from registry.state import ClusterState

log = logging.getLogger(__name__)

_RESERVE = "reserve"  # the first phase of a start, in which it takes its room in the arena
_REACH_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDemand:
    """This gateway's own calls, which need no way through the feed."""

    gateway_id: str
    admission: Admission
    slots: Slots


class Controller:
    """`run` plans after every change and at every time that the last plan named."""

    def __init__(
        self,
        state: ClusterState,
        directory: Directory,
        sync: DirectorySync,
        changes: Wakeup,
        work: Wakeup,
        leadership: Leadership,
        planner: Planner,
        replicator: Replicator,
        casts: Casts,
        live: LiveServing,
        calls: NodeCalls,
        local: LocalDemand,
        progress: StartProgress,
        clock: Clock,
    ) -> None:
        self.desired: dict[VersionKey, int] = {}
        self._state = state
        self._directory = directory
        self._sync = sync
        self._changes = changes
        self._leadership = leadership
        self._planner = planner
        self._replicator = replicator
        self._casts = casts
        self._live = live
        self._rising = Rising(self._settle_s)
        self._calls = calls
        self._local = local
        self._progress = progress
        self._clock = clock
        self._work = work
        changes.subscribe(work.notify)
        self._epoch: int | None = None
        self._led_from_s: float | None = None
        self._starts: set[str] = set()  # under way here
        self._stops: set[str] = set()  # of these, which were stopped meanwhile

    def __repr__(self) -> str:
        return f"<Controller {self._leadership!r} {self._planner!r}>"

    async def run(self) -> None:
        """Control until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                plan = self._plan()
                for action in plan.actions:
                    group.create_task(self._carry_out(action), name=f"controller {type(action).__name__}")
                delay_s = None if plan.next_at is None else max(0.0, plan.next_at - self._clock.monotonic_s())
                try:
                    async with asyncio.timeout(delay_s):
                        await self._work.wait()
                except TimeoutError:
                    pass  # a time that the plan named has come

    def _plan(self) -> Plan:
        self._epoch = self._leadership.epoch
        if self._epoch is None or not self._sync.alive:
            # Without the lease or the feed nothing may be decided; what runs goes on.
            self.desired = {}
            self._live.rest()
            self._rising.rest()
            self._led_from_s = None
            return Plan()
        now = self._clock.monotonic_s()
        if (until_s := self._reaching(now)) is not None:
            return Plan(next_at=until_s)
        demand, more_at = self._rising.taken_up(self._demand(), now)
        plan = self._planner.plan(self._directory, demand, self._local.slots.in_flight, now)
        plan.again_at(more_at)
        self._replicator.plan(self._directory, plan, now, self._clock.wall_s())
        self._casts.plan(self._directory, plan, self._planner.loading, self._clock.wall_s())
        self._live.plan(plan, demand, self._epoch)
        for key in plan.desired.keys() | self.desired.keys():
            if plan.desired.get(key) != self.desired.get(key):
                log.info("%s: %s instances desired", key, plan.desired.get(key, 0))
        self.desired = plan.desired
        for action in plan.actions:
            if isinstance(action, StopOn):
                self._directory.set_leaving(action.instance_id, True)
        return plan

    def _reaching(self, now: float) -> float | None:
        """Until when nothing is decided, since nodes are not reached yet by who has just begun to lead: what
        runs there would be begun a second time elsewhere."""
        if self._led_from_s is None:
            self._led_from_s = now
        until_s = self._led_from_s + _REACH_S
        all_reached = all(
            entry.reached or entry.record.state is not NodeState.READY for entry in self._directory.nodes()
        )
        if all_reached or now >= until_s:
            self._led_from_s = -inf  # from now on who is not reached is away
            return None
        return until_s

    def _demand(self) -> dict[VersionKey, KeyDemand]:
        in_flight: dict[VersionKey, int] = defaultdict(int)
        held: dict[VersionKey, int] = defaultdict(int)
        for lane in self._local.admission.lanes():
            in_flight[lane.key] += lane.in_flight
            held[lane.key] += len(lane.held)
        for demand in self._directory.demands(besides=self._local.gateway_id):
            key = VersionKey(demand.function, demand.version)
            in_flight[key] += demand.in_flight
            held[key] += demand.held
        return {key: KeyDemand(in_flight=in_flight[key], held=held[key]) for key in in_flight}

    def _settle_s(self, key: VersionKey) -> float:
        version = self._directory.version(key)
        nbytes = 0 if version is None else version.image_bytes
        return settle_s(nbytes, self._directory.links.usual_bytes_per_s)

    # --- carrying out

    def _carry_out(self, action: Action) -> Coroutine[None, None, None]:
        match action:
            case StartOn():
                return self._start(action)
            case GiveUp():
                return self._give_up(action)
            case StopOn():
                return self._stop(action)
            case WarmOn():
                return self._warm(action)
            case UnkeepOn():
                return self._unkeep(action)
            case DropFrom():
                return self._drop(action)
            case FetchVersion():
                return self._fetch(action)

    async def _start(self, action: StartOn) -> None:
        key, instance_id, epoch = action.key, action.instance_id, self._epoch
        stage = _RESERVE
        self._starts.add(instance_id)
        log.info("starting %s of %s on %s", instance_id, key, action.node)
        try:
            action = await self._live.begin(action)
            async for step in self._calls.start(action, epoch or 0):
                stage = step.stage
                self._progress.note(key, instance_id, stage, step.fraction)
                self._live.heard(action, step.held)
                self._changes.notify_soon()
            self._live.ready(action)
            self._planner.started(instance_id, self._clock.monotonic_s())
            await self._calls.refresh(action.node)
        except SourceGone as error:
            self._live.gone(action, str(error))
            log.info("start of %s of %s on %s put off: %s", instance_id, key, action.node, error)
            self._planner.put_off(instance_id)
        except RegistryError as error:
            self._live.gone(action, str(error))
            if instance_id in self._stops:  # it failed because it was stopped
                self._planner.put_off(instance_id)
                return
            log.warning("start of %s of %s on %s failed: %s", instance_id, key, action.node, error)
            # Later on it is the host's memory that has no room.
            if isinstance(error, RemoteError) and error.code == "out_of_memory" and stage == _RESERVE:
                await self._calls.refresh(action.node)
                now = self._clock.monotonic_s()
                self._planner.no_room(action, self._directory, error.message, now)
            else:
                await self._start_failed(action, error)
        finally:
            self._starts.discard(instance_id)
            self._stops.discard(instance_id)
            self._progress.forget(key, instance_id)
            self._changes.notify_soon()

    async def _start_failed(self, action: StartOn, error: RegistryError) -> None:
        """Count it here at once, and tell the other gateways in the node's stead if it did not itself."""
        lost = isinstance(error, ChannelClosed)
        reason = error.message if isinstance(error, RemoteError) else str(error)
        known = self._directory.instance(action.instance_id)
        now = self._clock.monotonic_s()
        self._directory.start_failed(action.key, action.instance_id, "" if lost else action.node, reason)
        self._planner.failed(action.key, action.instance_id, action.node, now, at_fault=not lost)
        if not lost and known is None:
            await self._tell_failed(action.version, action.instance_id, action.node, reason)

    async def _give_up(self, action: GiveUp) -> None:
        key = VersionKey(action.version.function, action.version.version)
        log.warning("%s cannot be started: %s", key, action.reason)
        for node, instance_id in action.starts.items():
            self._directory.start_failed(key, instance_id, node, action.reason)
        self._changes.notify_soon()
        for node, instance_id in action.starts.items():
            await self._tell_failed(action.version, instance_id, node, action.reason)

    async def _tell_failed(self, version: FunctionVersion, instance_id: str, node: str, reason: str) -> None:
        """Have the other gateways learn of a failed start that no node tells of."""
        entry = self._directory.node(node)
        if entry is None or self._leadership.epoch is None:
            return
        record = InstanceRecord(
            instance_id=instance_id,
            function=version.function,
            version=version.version,
            node=node,
            state=InstanceState.FAILED,
            start_kind=StartKind.COLD,
            since=self._clock.wall_s(),
            error=reason,
        )
        try:
            await self._state.put_instance(record, entry.record.epoch)
        except RegistryError as failure:
            log.info("failure of %s not published: %s", instance_id, failure)

    async def _stop(self, action: StopOn) -> None:
        log.info("stopping %s on %s", action.instance_id, action.node)
        if action.instance_id in self._starts:
            self._stops.add(action.instance_id)
        try:
            await self._calls.stop(action)
        except RemoteError as error:
            log.info("stop of %s on %s: %s", action.instance_id, action.node, error)
            if error.code != "no_such_instance":
                self._stop_failed(action.instance_id)
        except RegistryError as error:
            log.info("stop of %s on %s: %s", action.instance_id, action.node, error)
            self._stop_failed(action.instance_id)
        else:
            await self._calls.refresh(action.node)
        self._changes.notify_soon()

    def _stop_failed(self, instance_id: str) -> None:
        self._directory.set_leaving(instance_id, False)
        self._planner.stop_failed(instance_id)

    async def _warm(self, action: WarmOn) -> None:
        image = action.version.image
        assert image is not None
        log.info("warming %s:%d on %s", action.version.function, action.version.version, action.node)
        try:
            steps = self._calls.warm(
                action.version,
                action.node,
                action.holders,
                cast=action.cast,
                keep=action.keep,
                yielding=action.yielding,
            )
            async for _ in steps:
                pass
            await self._refresh_host(action.node)
        except RegistryError as error:
            log.warning("warming %s on %s failed: %s", action.version.function, action.node, error)
            self._replicator.failed(image, action.node, self._clock.monotonic_s())
        finally:
            self._planner.warmed(image, action.node)
            self._changes.notify_soon()

    async def _unkeep(self, action: UnkeepOn) -> None:
        log.info("%s need not be kept on %s any more", action.image[:12], action.node)
        try:
            await self._calls.unkeep(action.image, action.node)
            await self._refresh_host(action.node)
        except RegistryError as error:
            log.info("unkeep on %s: %s", action.node, error)  # the replicator asks again in a while
        self._changes.notify_soon()

    async def _drop(self, action: DropFrom) -> None:
        log.info("dropping %s from the %s tier of %s", action.image[:12], action.tier, action.node)
        try:
            await self._calls.drop(action.image, action.node, action.tier)
            await self._refresh_host(action.node)
        except RegistryError as error:
            log.info("drop on %s: %s", action.node, error)  # the replicator asks again in a while
        self._changes.notify_soon()

    async def _refresh_host(self, node: str) -> None:
        """Learn anew what the nodes hold that share the host memory of `node`."""
        entry = self._directory.node(node)
        for other in self._directory.nodes():
            if entry is not None and other.reached and other.record.host == entry.record.host:
                await self._calls.refresh(other.record.id)

    async def _fetch(self, action: FetchVersion) -> None:
        try:
            self._directory.put_version(await self._state.version(action.key.function, action.key.version))
        except RegistryError as error:
            log.warning("version %s not read: %s", action.key, error)
            self._directory.start_failed(action.key, f"version {action.key}", "", str(error))
        self._planner.fetched(action.key)
        self._changes.notify_soon()
