"""The coordinator of live serving: starts and load reports become decisions, pipelines and pairs.

It belongs to the controller; every gateway routes calls to the pipelines that it publishes (`publisher`).
"""

import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.cluster.node_client import ChannelPool
from gateway.cluster.start_assets import StartAssets
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.live.connections import OpenPipelines, PipelineFailed
from gateway.live.forecast import ModelLoad, first_layer
from gateway.live.group import (
    ClosePipeline,
    LiveGroup,
    LiveGroupAction,
    PipelineModel,
    PromoteMember,
    StartPipeline,
)
from gateway.live.load_tracker import ClusterFacts, LoadTracker
from gateway.live.model_layers import ModelLayers, NotLayered, is_layered, layers_of
from gateway.live.pairs import PairAction, PairGroup, UpdatePair
from gateway.live.policy import LiveDecision
from gateway.live.publisher import LiveStatePublisher
from gateway.live.recovered import recovered_actions, unclaimed_starts
from gateway.planning.actions import StartAction
from gateway.planning.plan import Plan, VersionDemand
from gateway.planning.work import UNSEEN, InstanceCapacity
from registry.clock import Clock
from registry.errors import ImageError, NotFound
from registry.images.codec import decode_manifest
from registry.images.manifest import UNIT_BYTES
from registry.messages.live import decode_layer_set
from registry.messages.node import InstanceProgress
from registry.records.function import FunctionVersion
from registry.records.live import InstanceRole, LiveMode, LivePipeline, LiveRecord

log = logging.getLogger(__name__)

_MAX_MODELS = 64  # models whose layers are cached: a large manifest takes long to decode
_MAX_STARTS = 4096  # ids of starts that were made or joined
Group = LiveGroup | PairGroup


class LiveCoordinator:
    """The pipelines and pairs of all versions that load.

    Every start of a function whose `live` is not `off` reports its layers, so the decision can be made again
    while it loads. `run` keeps pipelines open; all other methods are called by the controller.

    Pipelines are not closed when this gateway stops: their nodes keep them until another controller recovers
    them.
    """

    def __init__(
        self,
        state_cache: ClusterStateCache,
        links: ChannelPool,
        assets: StartAssets,
        publisher: LiveStatePublisher,
        clock: Clock,
    ) -> None:
        self._state_cache = state_cache
        self._links = links
        self._assets = assets
        self._publisher = publisher
        self._clock = clock
        self._epoch: int | None = None
        self._tracker = LoadTracker(state_cache)
        self._groups: dict[VersionKey, Group] = {}
        self._demand: Mapping[VersionKey, VersionDemand] = {}
        self._known: dict[str, None] = {}  # starts that this gateway made or joined, oldest first
        self._open = OpenPipelines(state_cache, links, publisher, self._opened, self._on_lost)
        self._opening: dict[str, tuple[LiveMode, float]] = {}  # by pipeline id: its mode, and since when
        self._recovered: dict[str, tuple[VersionKey, LivePipeline]] = {}
        self._layered: dict[str, tuple[ModelLayers, bool]] = {}  # by manifest

    def __repr__(self) -> str:
        return f"<LiveCoordinator {self._groups!r} {self._open!r}>"

    async def run(self) -> None:
        """Keep pipelines open until cancelled."""
        await self._open.run()

    # --- called by the controller

    def plan(self, plan: Plan, demand: Mapping[VersionKey, VersionDemand], epoch: int) -> None:
        """Mark the planned starts that can serve live, and decide again on all versions that load.

        The controller plans after each change of a queue, of an instance and of the progress of a load.
        """
        if epoch != self._epoch:
            self._take_over(epoch)
        self._follow_recovered()
        self._demand = demand
        for key, roles in plan.roles.items():
            self._publisher.set_roles(key, roles)
        for key in list(self._groups):
            self._update_pairs(key)
        started = self._track_starts(plan)
        self._join_starts(plan)
        facts = ClusterFacts(self._state_cache)
        for key in self._tracker.keys:
            decided = plan.decisions.get(key)
            capacity = UNSEEN if decided is None else decided.load.capacity
            self._decide(key, capacity, facts, has_new_starts=key in started)

    def stand_down(self) -> None:
        """Without the lease, close the pipelines that a later controller does not publish."""
        for record in self._state_cache.live if self._epoch is not None else ():
            if record.controller_epoch > (self._epoch or 0):
                key = VersionKey(record.function, record.version)
                self._groups.pop(key, None)
                self._open.close_others(key, {pipeline.name for pipeline in record.pipelines})

    async def prepare_start(self, start: StartAction) -> StartAction:
        """Return the start with its load order; its node can become a stage from now on."""
        load = self._tracker.get(start)
        if not start.live or load is None:
            return replace(start, live=False)
        try:
            layers, head_first = await self._layers(start.version)
        except (NotLayered, NotFound, ImageError) as error:
            self._tracker.remove(start)
            reason = f"cannot serve live: {error}"
            self._publisher.set_decision(start.key, LiveDecision(way=LiveMode.OFF, reason=reason))
            return replace(start, live=False)
        load = self._tracker.update(start, layers=layers, head_first=head_first) or load
        decision = self._tracker.decision(start.key)
        if decision is not None and decision.is_live:
            group = self._add_to_group(start.key, decision.way, load)
            spreads = isinstance(group, LiveGroup)
        else:
            spreads = len(self._tracker.loads(start.key)) > 1 and not load.single_order
        return replace(start, first_layer=first_layer(load, layers) if spreads else 0)

    def on_progress(self, start: StartAction, report: InstanceProgress) -> None:
        """Record the progress of a start and the layers that its node can run."""
        load = self._tracker.get(start)
        if load is None:
            return
        transfer = "copy" if load.warm_loads else "fetch"
        progress = max(load.progress, report.fraction) if report.stage == transfer else load.progress
        held = decode_layer_set(report.held) if report.held else load.held
        self._tracker.update(start, progress=progress, held=held)
        if report.held and (group := self._groups.get(start.key)) is not None:
            self._carry_out(start.key, group.on_layers(start.node, start.instance_id, held))

    def on_ready(self, start: StartAction) -> None:
        self._tracker.remove(start)
        if (group := self._groups.get(start.key)) is not None:
            self._carry_out(start.key, group.on_ready(start.node, start.instance_id))
            self._tidy(start.key)

    def on_stopped(self, start: StartAction, reason: str) -> None:
        """Remove a start that failed or was stopped."""
        self._tracker.remove(start)
        if (group := self._groups.get(start.key)) is not None:
            self._carry_out(start.key, group.remove(start.node, start.instance_id, reason))
            self._tidy(start.key)

    # --- deciding

    def _track_starts(self, plan: Plan) -> set[VersionKey]:
        """Track and mark the planned starts that can serve live; return their versions."""
        starts: dict[VersionKey, list[StartAction]] = {}
        for number, action in enumerate(plan.actions):
            if not isinstance(action, StartAction):
                continue
            self._remember(action.instance_id)
            reason = self._why_never(action)
            if reason:
                self._publisher.set_decision(action.key, LiveDecision(way=LiveMode.OFF, reason=reason))
            else:
                plan.actions[number] = marked = replace(action, live=True)
                starts.setdefault(action.key, []).append(marked)
        for made in starts.values():
            self._tracker.add(made)
        return set(starts)

    def _why_never(self, start: StartAction) -> str:
        """Return why the start can never serve live, "" where it can."""
        if start.group is not None:
            return f"a group of {len(start.group.members)} nodes serves once all have their layers"
        if not is_layered(start.version):
            return f"a {start.version.task} function cannot serve live"
        return "live is off" if self._tracker.setting(start.key) is LiveMode.OFF else ""

    def _join_starts(self, plan: Plan) -> None:
        """Join the starts of an earlier controller, so that their nodes report layers to this one."""
        for decision, start in list(unclaimed_starts(self._state_cache, self._known)):
            log.info("%s: joining the start of %s on %s", start.key, start.instance_id, start.node)
            self._remember(start.instance_id)
            self._tracker.add([start])
            if decision.is_live:
                self._tracker.recover(start.key, decision)
            plan.actions.append(start)

    def _remember(self, instance_id: str) -> None:
        self._known[instance_id] = None
        while len(self._known) > _MAX_STARTS:
            del self._known[next(iter(self._known))]

    def _decide(
        self, key: VersionKey, capacity: InstanceCapacity, facts: ClusterFacts, *, has_new_starts: bool
    ) -> None:
        """Decide on a version that loads; where it goes live, its loads join from now on."""
        before = self._tracker.decision(key)
        decision = self._tracker.decide(key, self._demand.get(key, VersionDemand()), capacity, facts)
        was_live = before is not None and before.is_live
        if has_new_starts or decision.is_live != was_live:  # not for each change of a prediction
            self._publisher.set_decision(key, decision)
        for load in self._tracker.loads(key) if decision.is_live != was_live else ():
            if load.layers is None:
                continue  # it joins once its layers are known
            if decision.is_live:
                self._add_to_group(key, decision.way, load)
            elif (group := self._groups.get(key)) is not None:
                start = load.start
                self._carry_out(key, group.remove(start.node, start.instance_id, decision.reason))
        self._tidy(key)

    def _add_to_group(self, key: VersionKey, way: LiveMode, load: ModelLoad) -> Group:
        start, layers = load.start, load.layers
        assert layers is not None, start
        group = self._groups.get(key)
        if group is None and (way is LiveMode.ZIGZAG or load.single_order):
            group = self._groups[key] = PairGroup(
                len(layers), start.max_concurrency, _pipeline_id, alone=way is not LiveMode.ZIGZAG
            )
            self._update_pairs(key)
        elif group is None:
            model = PipelineModel(head_first=load.head_first, max_concurrency=start.max_concurrency)
            group = self._groups[key] = LiveGroup(layers, model, _pipeline_id)
        self._carry_out(key, group.add(start.node, start.instance_id, load.group, load.place))
        if load.held:
            self._carry_out(key, group.on_layers(start.node, start.instance_id, load.held))
        return group

    def _update_pairs(self, key: VersionKey) -> None:
        """Report the ready instances that run prompts to the pairs of a version.

        Those of recovered pairs are left out.
        """
        group = self._groups[key]
        if isinstance(group, PairGroup):
            sources = (pipeline.source for _, pipeline in self._recovered.values())
            helped = {source.instance_id for source in sources if source is not None}
            roles = self._state_cache.live.roles(key.function, key.version)
            ready = [
                one
                for one in self._state_cache.ready(key)
                if one.instance_id not in helped and roles.get(one.instance_id) is not InstanceRole.DECODE
            ]
            has_room = bool(ready) and not self._demand.get(key, VersionDemand()).held
            nodes = {one.instance_id: one.node for one in ready}
            self._carry_out(key, group.set_ready(nodes, has_room=has_room))

    async def _layers(self, version: FunctionVersion) -> tuple[ModelLayers, bool]:
        """Return the layers, one bit each, and whether the head is on the first one. Raises NotLayered."""
        known = self._layered.get(version.manifest or "")
        if known is not None:
            return known
        image = await self._assets.image_ref(version, ())
        if image is None:
            raise NotLayered(f"{version.function} has no image")
        manifest = decode_manifest(image.manifest_bytes)
        costs = layers_of(manifest, UNIT_BYTES).costs
        needs = tuple(1 << layer for layer in range(len(costs)))
        found = ModelLayers(needs=needs, costs=costs), manifest.tied_head
        self._layered[image.manifest] = found
        if len(self._layered) > _MAX_MODELS:
            del self._layered[next(iter(self._layered))]
        return found

    # --- carrying out

    def _carry_out(self, key: VersionKey, todo: Iterable[LiveGroupAction | PairAction]) -> None:
        for one in todo:
            match one:
                case StartPipeline(pipeline=pipeline, reason=reason):
                    log.info("%s: pipeline %s opens: %s", key, pipeline, reason)
                    self._opening[pipeline.pipeline_id] = pipeline.way, self._clock.monotonic_s()
                    self._open.open(key, pipeline)
                case UpdatePair(pipeline=pipeline):
                    if self._publisher.pipeline(key, pipeline.pipeline_id) is not None:
                        self._publisher.put_pipeline(key, pipeline)
                case PromoteMember(pipeline_id=id_, switch=switch, reason=reason):
                    log.info("%s: %s of pipeline %s is promoted: %s", key, switch.instance_id, id_, reason)
                    self._publisher.add_switch(key, id_, switch)
                case ClosePipeline(pipeline_id=id_, reason=reason):
                    log.info("%s: pipeline %s closes: %s", key, id_, reason)
                    self._close(key, id_)

    def _close(self, key: VersionKey, pipeline_id: str) -> None:
        self._publisher.remove_pipeline(key, pipeline_id)
        self._recovered.pop(pipeline_id, None)
        self._end_opening(pipeline_id)
        self._open.close(key, pipeline_id)

    def _end_opening(self, pipeline_id: str) -> None:
        mode, since = self._opening.pop(pipeline_id, (None, 0.0))
        if mode is not None:
            self._tracker.openings.on_opening_ended(mode, self._clock.monotonic_s() - since)

    def _opened(self, key: VersionKey, pipeline: LivePipeline) -> None:
        self._end_opening(pipeline.pipeline_id)
        if isinstance(group := self._groups.get(key), LiveGroup):
            group.on_opened(pipeline.pipeline_id, pipeline.epoch)

    def _on_lost(self, key: VersionKey, pipeline: LivePipeline, failure: PipelineFailed) -> None:
        self._recovered.pop(pipeline.pipeline_id, None)
        self._opening.pop(pipeline.pipeline_id, None)
        if (group := self._groups.get(key)) is not None:
            self._carry_out(
                key, group.on_lost(pipeline.pipeline_id, pipeline.epoch, failure.node, str(failure))
            )
            self._tidy(key)

    # --- recovery from an earlier controller

    def _take_over(self, epoch: int) -> None:
        """Recover what the records state, unless no other controller held the lease in between."""
        before, self._epoch = self._epoch, epoch
        if before is not None and epoch > before + 1:
            self._groups.clear()
            self._opening.clear()
            self._tracker.clear()
            self._publisher.clear()
        for record in self._state_cache.live:
            if record.controller_epoch < epoch:
                self._recover(record)

    def _recover(self, record: LiveRecord) -> None:
        key = VersionKey(record.function, record.version)
        if key in self._groups:
            return
        self._open.close_others(key, {pipeline.name for pipeline in record.pipelines})
        if record.way is LiveMode.OFF and not (record.pipelines or record.roles):
            return
        if record.pipelines:
            log.info("%s: recovering %d pipelines of an earlier controller", key, len(record.pipelines))
        self._publisher.recover(record)
        self._recovered |= {pipeline.pipeline_id: (key, pipeline) for pipeline in record.pipelines}

    def _follow_recovered(self) -> None:
        for pipeline_id, (key, recovered) in list(self._recovered.items()):
            pipeline = self._publisher.pipeline(key, pipeline_id)
            if pipeline is None:
                del self._recovered[pipeline_id]
                continue
            if not self._open.is_open(key, recovered) and self._is_reachable(recovered):
                self._open.open(key, recovered)
            self._carry_out(key, recovered_actions(pipeline, self._state_cache))

    def _is_reachable(self, pipeline: LivePipeline) -> bool:
        """Return whether the channel to its head is up, which a new controller may have to wait for."""
        return self._links.client(pipeline.stages[pipeline.head].node) is not None

    def _tidy(self, key: VersionKey) -> None:
        group = self._groups.get(key)
        if group is not None and group.is_over:
            del self._groups[key]


def _pipeline_id() -> str:
    return secrets.token_hex(8)
