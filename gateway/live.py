"""Serving while a model loads: what the starts tell goes into decisions, and these are carried out.

The controller's; every gateway then sends calls to the pipelines that it tells of (gateway/live_board.py).
"""

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.actions import StartOn
from gateway.directory import Directory, VersionKey
from gateway.known_links import known_links
from gateway.live_adopted import strangers, todos
from gateway.live_board import LiveBoard
from gateway.live_group import Close, GroupSettings, LiveGroup, Open, Switch, Todo
from gateway.live_open import OpenPipelines, PipelineFailed
from gateway.live_outlook import Arriving, arriving, first_layer, outlook, start_costs
from gateway.live_policy import LiveDecision, decide_live
from gateway.lone_group import LoneGroup
from gateway.model_layers import ModelLayers, NotLayered, layers_of
from gateway.node_client import Links
from gateway.plan import KeyDemand, Plan
from gateway.start_assets import StartAssets
from gateway.zigzag_pairs import Grown, PairTodo, ZigZagPairs
from registry.errors import ImageError, NotFound
from registry.function import FunctionVersion, Task
from registry.images.codec import decode_manifest
from registry.images.manifest import UNIT_BYTES
from registry.instance import InstanceState
from registry.live import Live, LivePipeline, LiveRecord
from registry.live_messages import held_of_bytes

log = logging.getLogger(__name__)

_KEPT = 64  # models whose layers are known: a large manifest takes long to read
_REMEMBERED = 4096  # starts that were made or joined


class LiveServing:
    """`run` keeps pipelines open. All else is called by the controller, in its turn.

    When this gateway goes, its pipelines are not closed: their nodes keep them for a while, until another
    controller takes them over.
    """

    def __init__(self, directory: Directory, links: Links, assets: StartAssets, board: LiveBoard) -> None:
        self._directory = directory
        self._links = links
        self._assets = assets
        self._board = board
        self._epoch: int | None = None
        self._groups: dict[VersionKey, LiveGroup | LoneGroup | ZigZagPairs] = {}
        self._arriving: dict[str, Arriving] = {}  # by instance, until its start is made
        self._places: dict[VersionKey, dict[str, float]] = {}  # where loads under way began, by instance
        self._held: dict[VersionKey, int] = {}  # calls that wait for a slot, of all gateways
        self._begun: dict[str, None] = {}  # starts that this gateway made or joined, the oldest first
        self._open = OpenPipelines(directory, links, board, self._opened, self._lost)
        self._adopted: dict[str, tuple[VersionKey, LivePipeline]] = {}
        self._layered: dict[str, tuple[ModelLayers, bool]] = {}  # by manifest

    def __repr__(self) -> str:
        return f"<LiveServing {self._groups!r} {self._open!r}>"

    async def run(self) -> None:
        """Keep pipelines open until cancelled."""
        await self._open.run()

    # --- what the controller tells

    def plan(self, plan: Plan, demand: dict[VersionKey, KeyDemand], epoch: int) -> None:
        """Say of each start in the plan whether it is live; look after what an earlier controller left."""
        if epoch != self._epoch:
            self._take_over(epoch)
        self._follow_adopted()
        self._held = {key: one.held for key, one in demand.items()}
        for key, group in list(self._groups.items()):
            self._tell_sources(key)
            if isinstance(group, LoneGroup):
                self._carry_out(key, group.look())
        starts: dict[VersionKey, list[StartOn]] = {}
        for action in plan.actions:
            if isinstance(action, StartOn):
                starts.setdefault(action.key, []).append(action)
        live: set[str] = set()
        for key, made in starts.items():
            decision = self._decide(key, made, demand.get(key, KeyDemand()))
            self._board.decided(key, decision)
            if decision.way is not Live.OFF:
                live |= {start.instance_id for start in made}
                self._expect(made, decision.way)
        plan.actions[:] = [
            replace(action, live=True)
            if isinstance(action, StartOn) and action.instance_id in live
            else action
            for action in plan.actions
        ]
        self._remember(start.instance_id for made in starts.values() for start in made)
        self._join_starts(plan)

    def rest(self) -> None:
        """This gateway has no lease: where another one tells by now, what that leaves out is over here."""
        for record in self._directory.live if self._epoch is not None else ():
            if record.controller_epoch > (self._epoch or 0):
                key = VersionKey(record.function, record.version)
                self._groups.pop(key, None)
                self._open.leave_others(key, {pipeline.name for pipeline in record.pipelines})

    async def begin(self, start: StartOn) -> StartOn:
        """The start is about to be made; returns it as it is to be made."""
        one = self._arriving.pop(start.instance_id, None)
        if not start.live or one is None:
            return replace(start, live=False)
        try:
            layers, head_first = await self._layers(start.version)
        except (NotLayered, NotFound, ImageError) as error:
            self._board.decided(start.key, LiveDecision(way=Live.OFF, reason=f"cannot go live: {error}"))
            return replace(start, live=False)
        group = self._groups.get(start.key)
        if group is None and one.way is Live.ZIGZAG:
            group = self._groups[start.key] = ZigZagPairs(len(layers), start.max_concurrency, _pipeline_id)
            self._tell_sources(start.key)
        elif group is None and one.lone:
            group = self._groups[start.key] = LoneGroup(
                len(layers),
                start.max_concurrency,
                _pipeline_id,
                lambda: self._has_room(start.key),
            )
        elif group is None:
            settings = GroupSettings(head_first=head_first, max_concurrency=start.max_concurrency)
            group = self._groups[start.key] = LiveGroup(layers, settings, _pipeline_id)
        self._carry_out(start.key, group.begin(start.node, start.instance_id, one.group))
        in_parts = isinstance(group, LiveGroup)
        return replace(start, first_layer=first_layer(one, layers) if in_parts else 0)

    def heard(self, start: StartOn, held: bytes) -> None:
        """The start tells which layers can run."""
        group = self._groups.get(start.key)
        if held and group is not None:
            self._carry_out(start.key, group.holds(start.node, start.instance_id, held_of_bytes(held)))

    def ready(self, start: StartOn) -> None:
        self._over(start)
        if (group := self._groups.get(start.key)) is not None:
            self._carry_out(start.key, group.ready(start.node, start.instance_id))
            self._tidy(start.key)

    def gone(self, start: StartOn, reason: str) -> None:
        """The start failed, or was stopped."""
        self._over(start)
        if (group := self._groups.get(start.key)) is not None:
            self._carry_out(start.key, group.gone(start.node, start.instance_id, reason))
            self._tidy(start.key)

    def _has_room(self, key: VersionKey) -> bool:
        """Whether an instance is ready that takes more calls."""
        return bool(self._directory.ready(key)) and not self._held.get(key)

    def _tell_sources(self, key: VersionKey) -> None:
        """Pairs need instances that are ready."""
        group = self._groups[key]
        if isinstance(group, ZigZagPairs):
            adopted = (pipeline.source for _, pipeline in self._adopted.values())
            helped = {source.instance_id for source in adopted if source is not None}
            ready = [one for one in self._directory.ready(key) if one.instance_id not in helped]
            self._carry_out(key, group.sources({one.instance_id: one.node for one in ready}))

    def _expect(self, starts: Sequence[StartOn], way: Live) -> None:
        nodes = {node.id: node for node in self._directory.usable_nodes()}
        places = self._places.setdefault(starts[0].key, {})
        found = arriving(starts, nodes, places.values())
        places |= {one.start.instance_id: one.place for one in found if one.place is not None}
        self._arriving |= {one.start.instance_id: replace(one, way=way) for one in found}

    def _over(self, start: StartOn) -> None:
        """It loads no more."""
        self._arriving.pop(start.instance_id, None)
        if (places := self._places.get(start.key)) is not None:
            places.pop(start.instance_id, None)
            if not places:
                del self._places[start.key]

    # --- deciding

    def _decide(self, key: VersionKey, starts: list[StartOn], demand: KeyDemand) -> LiveDecision:
        version, head = starts[0].version, self._directory.functions.get(key.function)
        if version.task is not Task.GENERATE or version.manifest is None or head is None:
            return LiveDecision(way=Live.OFF, reason=f"a {version.task} function cannot go live")
        nodes = {node.id: node for node in self._directory.usable_nodes()}
        ready = [one for one in self._directory.instances() if one.state is InstanceState.READY]
        nbytes = {(one.function, one.version): one.image_bytes for one in self._directory.versions()}
        prospect = outlook(
            starts,
            nodes,
            known_links(nodes.values(), self._directory.links),
            start_costs(ready, nbytes),
            coming=self._directory.coming(key),
            ready=len(self._directory.ready(key)),
            held=demand.held,
        )
        return decide_live(head.scaling.live, prospect, head.scaling.ttft_target_s)

    async def _layers(self, version: FunctionVersion) -> tuple[ModelLayers, bool]:
        """A bit a layer, and whether the head is with the first one. Raises NotLayered."""
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
        if len(self._layered) > _KEPT:
            del self._layered[next(iter(self._layered))]
        return found

    # --- carrying out

    def _carry_out(self, key: VersionKey, todo: Iterable[Todo | PairTodo]) -> None:
        for one in todo:
            match one:
                case Open(pipeline=pipeline, reason=reason):
                    log.info("%s: pipeline %s is to serve: %s", key, pipeline, reason)
                    self._open.hold(key, pipeline)
                case Grown(pipeline=pipeline):
                    if self._board.pipeline(key, pipeline.pipeline_id) is not None:
                        self._board.put(key, pipeline)
                case Switch(pipeline_id=id_, switch=switch, reason=reason):
                    log.info("%s: %s of pipeline %s serves alone: %s", key, switch.instance_id, id_, reason)
                    self._board.switched(key, id_, switch)
                case Close(pipeline_id=id_, reason=reason):
                    log.info("%s: pipeline %s ends: %s", key, id_, reason)
                    self._close(key, id_)

    def _close(self, key: VersionKey, pipeline_id: str) -> None:
        self._board.drop(key, pipeline_id)
        self._adopted.pop(pipeline_id, None)
        self._open.leave(key, pipeline_id)

    def _opened(self, key: VersionKey, pipeline: LivePipeline) -> None:
        if isinstance(group := self._groups.get(key), LiveGroup):
            group.opened(pipeline.pipeline_id, pipeline.epoch)

    def _lost(self, key: VersionKey, pipeline: LivePipeline, failure: PipelineFailed) -> None:
        self._adopted.pop(pipeline.pipeline_id, None)
        if (group := self._groups.get(key)) is not None:
            self._carry_out(key, group.lost(pipeline.pipeline_id, pipeline.epoch, failure.node, str(failure)))
            self._tidy(key)

    # --- what an earlier controller left

    def _take_over(self, epoch: int) -> None:
        """The lease is ours, maybe again: go on from what the records tell, unless nobody else had it."""
        before, self._epoch = self._epoch, epoch
        if before is not None and epoch > before + 1:
            self._groups.clear()
            self._board.forget()
        for record in self._directory.live:
            if record.controller_epoch < epoch:
                self._adopt(record)

    def _adopt(self, record: LiveRecord) -> None:
        key = VersionKey(record.function, record.version)
        if key in self._groups:
            return
        self._open.leave_others(key, {pipeline.name for pipeline in record.pipelines})
        if record.way is Live.OFF and not record.pipelines:
            return
        log.info("%s: %d pipelines of an earlier controller go on", key, len(record.pipelines))
        self._board.adopt(record)
        self._adopted |= {pipeline.pipeline_id: (key, pipeline) for pipeline in record.pipelines}

    def _join_starts(self, plan: Plan) -> None:
        """Hear of starts that an earlier controller made: what loads there is to serve, too."""
        for way, start in strangers(self._directory, self._begun):
            log.info("%s: the start of %s on %s is joined", start.key, start.instance_id, start.node)
            self._remember([start.instance_id])
            self._expect([start], way)
            plan.actions.append(start)

    def _remember(self, instance_ids: Iterable[str]) -> None:
        self._begun |= dict.fromkeys(instance_ids)
        while len(self._begun) > _REMEMBERED:
            del self._begun[next(iter(self._begun))]

    def _follow_adopted(self) -> None:
        for pipeline_id, (key, adopted) in list(self._adopted.items()):
            pipeline = self._board.pipeline(key, pipeline_id)
            if pipeline is None:
                del self._adopted[pipeline_id]
                continue
            if not self._open.is_open(key, adopted) and self._head_answers(adopted):
                self._open.hold(key, adopted)
            self._carry_out(key, todos(pipeline, self._directory))

    def _head_answers(self, pipeline: LivePipeline) -> bool:
        """Whether there is a channel to its head: a gateway that comes up may lead before it has all."""
        return self._links.client(pipeline.stages[pipeline.head].node) is not None

    def _tidy(self, key: VersionKey) -> None:
        group = self._groups.get(key)
        if group is not None and group.is_over:
            del self._groups[key]


def _pipeline_id() -> str:
    return secrets.token_hex(8)
