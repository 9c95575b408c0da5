"""The control loop: state cache and demand to a plan, the plan to calls on nodes; needs the lease."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from math import inf

from gateway.cluster.condition import ChangeCondition
from gateway.cluster.context import ClusterContext
from gateway.cluster.state_cache import VersionKey
from gateway.control.context import LocalLoad, Planners
from gateway.control.decisions import DecisionPublisher
from gateway.control.leadership import Leadership
from gateway.control.node_calls import NodeCalls, SourceLost
from gateway.control.rollout_control import RolloutControl
from gateway.core.node_demand import NodeDemand
from gateway.planning.actions import (
    Action,
    DropAction,
    FailStartAction,
    FetchLayersAction,
    FetchVersionAction,
    PrefetchAction,
    PrepareLinksAction,
    StartAction,
    StopAction,
    UnpinAction,
)
from gateway.planning.debounce import DemandDebouncer, settle_s
from gateway.planning.demand_sum import DemandSum
from gateway.planning.link_peers import LinkPlanner
from gateway.planning.node_demands import node_demands
from gateway.planning.plan import Plan, VersionDemand
from gateway.planning.rollouts import RolloutAction
from registry.errors import ChannelClosed, RegistryError, RemoteError, reason_of
from registry.records.fence import NO_FENCE, Fence
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceRecord, InstanceState, StartKind
from registry.records.node import NodeState

log = logging.getLogger(__name__)

_MEMBERS_S = 10.0  # how long a group's leader is started after its members at most
_LAYERS_RETRY_S = 1.0
_RESERVE = "reserve"  # the first phase of a start, in which it reserves arena space
_CONNECT_S = 0.5  # how long a new controller waits for channels to all nodes
_STEP_S = 0.02  # between the beginnings of two steps: while much changes, each takes in many changes


class Controller:
    """The control loop, which plans soon after every change and at the time set by the last plan.

    After a pause a change is planned for at once, others at most `_STEP_S` after the step before.
    """

    def __init__(
        self,
        cluster: ClusterContext,
        planners: Planners,
        local: LocalLoad,
        calls: NodeCalls,
        leadership: Leadership,
        work: ChangeCondition,
        decisions: DecisionPublisher,
        rollouts: RolloutControl,
    ) -> None:
        self.desired: dict[VersionKey, int] = {}
        self._state = cluster.state
        self._state_cache = cluster.state_cache
        self._sync = cluster.sync
        self._changes = cluster.changes
        self._clock = cluster.clock
        self._planner = planners.scaling
        self._replicator = planners.replicator
        self._casts = planners.casts
        self._live = planners.live
        self._rollouts = rollouts
        self._links = LinkPlanner()
        self._debouncer = DemandDebouncer(self._settle_s)
        self._demand_sum = DemandSum()
        self._decisions = decisions
        self._local = local
        self._progress = local.progress
        self._calls = calls
        self._leadership = leadership
        self._work = work
        cluster.changes.subscribe(work.notify)
        self._fence: Fence | None = None
        self._led_from_s: float | None = None
        self._has_planned = False  # the planner's last step is of now
        self._starts: set[str] = set()  # in progress here
        self._stops: set[str] = set()  # of these, those that are being stopped

    def __repr__(self) -> str:
        return f"<Controller {self._leadership!r} {self._planner!r}>"

    async def run(self) -> None:
        """Run the loop until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                began_s = self._clock.monotonic_s()
                plan = self._plan()
                for action in plan.actions:
                    group.create_task(self._execute(action), name=f"controller {type(action).__name__}")
                delay_s = None if plan.next_at is None else max(0.0, plan.next_at - self._clock.monotonic_s())
                try:
                    async with asyncio.timeout(delay_s):
                        await self._work.wait()
                except TimeoutError:
                    pass  # the time set by the plan
                passed_s = self._clock.monotonic_s() - began_s
                if 0 <= passed_s < _STEP_S:
                    await asyncio.sleep(_STEP_S - passed_s)

    def node_demands(self) -> tuple[NodeDemand, ...]:
        """Return how many nodes each pool has, lacks and does not need; none while another gateway leads."""
        if not self._has_planned:
            return ()
        cache = self._state_cache
        starting_on = {start.node for start in self._planner.pending.values()}
        starting_on |= {node for _, node in self._planner.prefetching}
        return node_demands(cache, self._planner.unplaced(cache), starting_on)

    def _plan(self) -> Plan:
        self._fence = self._leadership.fence
        self._rollouts.note(self._local.admission.averages.traffic)
        if self._fence is None or not self._sync.alive:
            # Without the lease or the feed nothing is decided; actions in progress continue.
            self.desired, self._has_planned = {}, False
            self._live.stand_down()
            for instance_id in self._planner.stand_down():
                self._state_cache.set_draining(instance_id, False)
            self._debouncer.reset()
            self._links.reset()
            self._decisions.stand_down()
            self._demand_sum = DemandSum()  # what arrives meanwhile is no burst
            self._led_from_s = None
            return Plan()
        now = self._clock.monotonic_s()
        if (until_s := self._connecting_until(now)) is not None:
            return Plan(next_at=until_s)
        demand, more_at = self._debouncer.debounce(self._demand(), now)
        plan = self._planner.plan(self._state_cache, demand, self._local.slots.in_flight, now)
        plan.replan_at(more_at)
        self._replicator.plan(self._state_cache, plan, now, self._clock.wall_s())
        self._casts.plan(self._state_cache, plan, self._planner.loading, self._clock.wall_s())
        self._live.plan(plan, demand, self._fence.epoch)
        plan.actions += self._links.plan(list(self._state_cache.usable_nodes()))
        self._rollouts.plan(plan)
        for key in plan.desired.keys() | self.desired.keys():
            if plan.desired.get(key) != self.desired.get(key):
                log.info("%s: %s instances desired", key, plan.desired.get(key, 0))
        self.desired, self._has_planned = plan.desired, True
        self._decisions.note(plan, self._state_cache.functions, self._clock.wall_s())
        for instance_id, paused in plan.paused.items():
            self._state_cache.set_draining(instance_id, paused)
            log.info("%s instance %s", "pausing" if paused else "resuming", instance_id)
        if not all(plan.paused.values()):
            self._changes.notify_soon()  # queued calls can go there
        for action in plan.actions:
            if isinstance(action, StopAction):
                self._state_cache.set_draining(action.instance_id, True)
        return plan

    def _connecting_until(self, now: float) -> float | None:
        """Return until when a new controller waits for channels to all nodes, None if it need not wait.

        Without a channel the instances of a node are unknown and would be started again elsewhere.
        """
        if self._led_from_s is None:
            self._led_from_s = now
        until_s = self._led_from_s + _CONNECT_S
        all_reached = all(
            entry.reached or entry.record.state is not NodeState.READY for entry in self._state_cache.nodes()
        )
        if all_reached or now >= until_s:
            self._led_from_s = -inf  # from now on nodes without a channel are lost
            return None
        return until_s

    def _demand(self) -> dict[VersionKey, VersionDemand]:
        own = self._local.gateway_id
        reports = {report.gateway: report.loads for report in self._state_cache.load_reports(exclude=own)}
        return self._demand_sum.update({**reports, own: self._local.admission.loads()})

    def _settle_s(self, key: VersionKey) -> float:
        version = self._state_cache.version(key)
        nbytes = 0 if version is None else version.image_bytes
        return settle_s(nbytes, self._state_cache.link_rates.usual_bytes_per_s())

    # --- execution

    def _execute(self, action: Action) -> Coroutine[None, None, None]:
        match action:
            case StartAction():
                return self._start(action)
            case FailStartAction():
                return self._fail_starts(action)
            case StopAction():
                return self._stop(action)
            case PrefetchAction():
                return self._warm(action)
            case UnpinAction():
                return self._unpin(action)
            case DropAction():
                return self._drop(action)
            case FetchVersionAction():
                return self._fetch(action)
            case FetchLayersAction():
                return self._fetch_layers(action.version)
            case PrepareLinksAction():
                return self._prepare_links(action)
            case RolloutAction():
                return self._change_rollout(action)

    async def _change_rollout(self, action: RolloutAction) -> None:
        await self._rollouts.change(action)
        self._changes.notify_soon()

    async def _start(self, action: StartAction) -> None:
        key, instance_id, fence = action.key, action.instance_id, self._fence or NO_FENCE
        stage = _RESERVE
        self._starts.add(instance_id)
        log.info("%s: starting instance %s on node %s", key, instance_id, action.node)
        try:
            action = await self._live.prepare_start(action)
            await self._members_accepted(action)
            async for step in self._calls.start(action, fence):
                stage = step.stage
                self._progress.note(key, instance_id, stage, step.fraction)
                self._live.on_progress(action, step)
                self._changes.notify_soon()
            self._live.on_ready(action)
            self._planner.on_started(instance_id, self._clock.monotonic_s())
            await self._calls.refresh(action.node)
        except SourceLost as error:
            self._live.on_stopped(action, str(error))
            log.info("%s: start of %s on node %s postponed: %s", key, instance_id, action.node, error)
            self._planner.cancel_start(instance_id)
        except RegistryError as error:
            self._live.on_stopped(action, str(error))
            if instance_id in self._stops:  # it failed because it was stopped by the planner
                self._planner.cancel_start(instance_id)
                return
            log.warning("%s: start of %s on node %s failed: %s", key, instance_id, action.node, error)
            if isinstance(error, RemoteError) and error.code == "pipeline_lost":
                now = self._clock.monotonic_s()  # of a group, of which the member that failed reports why
                self._planner.on_start_failed(key, instance_id, action.node, now, at_fault=True)
                return
            # In later phases the error means the host's memory.
            if isinstance(error, RemoteError) and error.code == "out_of_memory" and stage == _RESERVE:
                await self._calls.refresh(action.node)
                now = self._clock.monotonic_s()
                self._planner.on_no_space(action, self._state_cache, error.message, now)
            else:
                await self._start_failed(action, error)
        finally:
            self._starts.discard(instance_id)
            self._stops.discard(instance_id)
            self._progress.forget(key, instance_id)
            self._changes.notify_soon()

    async def _members_accepted(self, action: StartAction) -> None:
        """Return once the nodes of a leader's other members have accepted these, or have not in time."""
        if action.group is None or action.group.leader.instance_id != action.instance_id:
            return
        others = action.group.others(action.instance_id)

        def accepted() -> bool:
            known = self._state_cache.instance
            return all(
                known(one.instance_id) is not None or one.instance_id not in self._planner.pending
                for one in others
            )

        with suppress(TimeoutError):
            async with asyncio.timeout(_MEMBERS_S):
                await self._changes.wait_for(accepted)

    async def _start_failed(self, action: StartAction, error: RegistryError) -> None:
        """Record the failure here, and publish it for the other gateways unless the node did."""
        lost = isinstance(error, ChannelClosed)
        reason = reason_of(error)
        known = self._state_cache.instance(action.instance_id)
        now = self._clock.monotonic_s()
        self._state_cache.backoff.log(action.key, action.instance_id, "" if lost else action.node, reason)
        self._planner.on_start_failed(action.key, action.instance_id, action.node, now, at_fault=not lost)
        if not lost and known is None:
            await self._publish_failure(action.version, action.instance_id, action.node, reason)

    async def _fail_starts(self, action: FailStartAction) -> None:
        key = VersionKey(action.version.function, action.version.version)
        log.warning("%s: no start is possible: %s", key, action.reason)
        for node, instance_id in action.starts.items():
            self._state_cache.backoff.log(key, instance_id, node, action.reason)
        self._changes.notify_soon()
        for node, instance_id in action.starts.items():
            await self._publish_failure(action.version, instance_id, node, action.reason)

    async def _publish_failure(
        self, version: FunctionVersion, instance_id: str, node: str, reason: str
    ) -> None:
        """Publish a failed start that no node publishes."""
        entry = self._state_cache.node(node)
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
            log.info("instance %s: failure not published: %s", instance_id, failure)

    async def _stop(self, action: StopAction) -> None:
        log.info("stopping instance %s on node %s", action.instance_id, action.node)
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
        self._state_cache.set_draining(instance_id, False)
        self._planner.on_stop_failed(instance_id)

    async def _warm(self, action: PrefetchAction) -> None:
        image = action.version.image
        assert image is not None
        log.info(
            "%s:%d: prefetching on node %s", action.version.function, action.version.version, action.node
        )
        try:
            steps = self._calls.warm(
                action.version,
                action.node,
                action.holders,
                cast=action.cast,
                pin=action.pin,
                preserve_pinned=action.preserve_pinned,
            )
            async for _ in steps:
                pass
            await self._refresh_host(action.node)
        except RegistryError as error:
            log.warning("prefetch of %s on node %s failed: %s", action.version.function, action.node, error)
            self._replicator.failed(image, action.node, self._clock.monotonic_s())
        finally:
            self._planner.on_prefetched(image, action.node)
            self._changes.notify_soon()

    async def _unpin(self, action: UnpinAction) -> None:
        log.info("image %s: unpinning on node %s", action.image[:12], action.node)
        await self._change_copy("unpin", action.node, self._calls.unpin(action.image, action.node))

    async def _prepare_links(self, action: PrepareLinksAction) -> None:
        try:
            await self._calls.prepare_links(action.node, action.peers)
        except RegistryError as error:  # casts connect by themselves
            log.info("links of node %s were not prepared: %s", action.node, error)

    async def _drop(self, action: DropAction) -> None:
        log.info("image %s: dropping from tier %s of node %s", action.image[:12], action.tier, action.node)
        await self._change_copy("drop", action.node, self._drop_copy(action))

    async def _drop_copy(self, action: DropAction) -> None:
        if all(version.image != action.image for version in self._state_cache.versions()):
            for node in self._sharers(action.node):  # of deleted functions
                await self._calls.close_folders(action.image, node)
        await self._calls.drop(action.image, action.node, action.tier)

    async def _change_copy(self, what: str, node: str, call: Coroutine[None, None, None]) -> None:
        try:
            await call
            await self._refresh_host(node)
        except RegistryError as error:
            log.info("%s on node %s failed: %s", what, node, error)  # the replicator retries
        self._changes.notify_soon()

    async def _refresh_host(self, node: str) -> None:
        """Read the records of all nodes that share the host memory of `node`."""
        for name in self._sharers(node):
            await self._calls.refresh(name)

    def _sharers(self, node: str) -> list[str]:
        """Return the reached nodes of the host of `node`."""
        entry = self._state_cache.node(node)
        return [
            other.record.id
            for other in self._state_cache.nodes()
            if entry is not None and other.reached and other.record.host == entry.record.host
        ]

    async def _fetch(self, action: FetchVersionAction) -> None:
        try:
            self._state_cache.put_version(await self._state.version(action.key.function, action.key.version))
        except RegistryError as error:
            log.warning("%s: version not read: %s", action.key, error)
            self._state_cache.backoff.log(action.key, f"version {action.key}", "", str(error))
        self._planner.on_fetched(action.key)
        self._changes.notify_soon()

    async def _fetch_layers(self, version: FunctionVersion) -> None:
        key = VersionKey(version.function, version.version)
        try:
            self._planner.on_layers(version, await self._calls.layers(version))
        except RegistryError as error:
            log.warning("%s: its layers were not read: %s", key, error)
            await asyncio.sleep(_LAYERS_RETRY_S)
            self._planner.on_layers_failed(version)
        self._changes.notify_soon()
