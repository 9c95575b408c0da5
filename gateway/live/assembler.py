"""Execution pipelines of nodes that load a model (pure; FaaScale's Algorithm 2).

As soon as free nodes hold all layers between them, they form a pipeline with balanced ranges: of the fewest
nodes, or of more where these have a much higher throughput, and of different sub-groups where possible.
A pipeline is reconfigured when a member fails, or when `gain` times its throughput is possible: with more
nodes, better ranges, or as several shorter pipelines. A node that holds everything is promoted at once and
takes its share of the requests; it remains a stage for the others until all members are promoted, so that
each request moves once. A node is in at most one pipeline.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from gateway.live.actions import (
    Create,
    LayersReported,
    LoadStarted,
    PipelineAction,
    PipelineEvent,
    PipelineOpening,
    PipelineServing,
    PlannedPipeline,
    Promote,
    Reconfigure,
    Teardown,
)
from gateway.live.model_layers import ModelLayers
from gateway.live.stage_cover import StageCandidate, StageCover, fewest_hops, most_even

_GROWTH = 1.1  # growth of the held layers after which better pipelines are searched for again
_WIDER_GAIN = 1.2
_STAGE_SHARE = 0.5  # of a promoted node's time, for its stage


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblerSettings:
    """The cost model of pipelines.

    `hop_cost` is the overhead per stage as a fraction of a step on one node (1 ms of 20), `max_stages` bounds
    a pipeline. It is reconfigured for `gain` times its rate, and for more once its members hold over half of
    the model: the new one lives shorter and recomputes more. Infinite: never.
    """

    hop_cost: float = 0.05
    max_stages: int = 8
    gain: float = 1.5


@dataclass(slots=True)
class _LoadingNode:
    """The state of a node: `ends` gives the runs of layers that it can execute, `layers` their number."""

    name: str
    group: int
    speed: float
    ends: tuple[int, ...]
    blocks: int = 0
    layers: int = 0
    whole: bool = False
    pipeline: int | None = None


class PipelineAssembler:
    """The pipelines of one model image: `apply` turns events into actions."""

    def __init__(self, layers: ModelLayers, settings: AssemblerSettings | None = None) -> None:
        self._layers = layers
        self._settings = settings or AssemblerSettings()
        self._nodes: dict[str, _LoadingNode] = {}
        self._pipelines: dict[int, PlannedPipeline] = {}
        self._searched: dict[
            int, tuple[frozenset[str], int]
        ] = {}  # by number: the nodes searched last, and the layers they held
        self._opening: set[int] = set()  # numbers
        self._next_number = 0

    def __repr__(self) -> str:
        return f"<Pipelines {[*self._pipelines.values()]!r}, whole {list(self.whole)!r}>"

    @property
    def pipelines(self) -> tuple[PlannedPipeline, ...]:
        """The pipelines that serve, oldest first."""
        return tuple(self._pipelines.values())

    @property
    def whole(self) -> tuple[str, ...]:
        """The promoted nodes."""
        return tuple(node.name for node in self._nodes.values() if node.whole)

    def apply(self, events: Iterable[PipelineEvent]) -> tuple[PipelineAction, ...]:
        """Return the actions that follow from simultaneous events."""
        lost: dict[int, list[str]] = {}
        changed: dict[str, None] = {}
        left = False
        for event in events:
            if isinstance(event, LoadStarted):
                self._join(event)
            elif isinstance(event, LayersReported):
                if self._hold(event):
                    changed[event.node] = None
            elif isinstance(event, PipelineOpening):
                self._opening.add(event.pipeline)
            elif isinstance(event, PipelineServing):
                self._opening.discard(event.pipeline)
            elif event.node in self._nodes:
                left = True
                changed.pop(event.node, None)
                pipeline = self._nodes.pop(event.node).pipeline
                if pipeline is not None:
                    lost.setdefault(pipeline, []).append(f"{event.node} is lost ({event.reason})")
        whole = [self._nodes[name] for name in changed if self._is_whole(name)]
        for node in whole:
            node.whole = True
        actions: list[PipelineAction] = [*self._promote(whole)]
        for number, reasons in lost.items():
            actions.extend(self._repair(number, ", ".join(reasons)))
        actions.extend(self._end())
        if changed or left:
            actions.extend(self._create_from_free())
            actions.extend(self._improve())
        return _final_actions(actions)

    # --- what nodes hold

    def _join(self, event: LoadStarted) -> None:
        """Add a node; one that restarts was reported as lost before."""
        known = _LoadingNode(event.node, event.group, event.speed, self._layers.ends(0))
        self._nodes.setdefault(event.node, known)

    def _hold(self, event: LayersReported) -> bool:
        """Record the blocks of a node; return whether it can run more layers than before."""
        node = self._nodes.get(event.node)
        if node is None or node.whole or not event.blocks & ~node.blocks:
            return False
        node.blocks |= event.blocks
        ends = self._layers.ends(node.blocks)
        more = ends != node.ends
        node.ends, node.layers = ends, sum(end > layer for layer, end in enumerate(ends))
        return more

    def _is_whole(self, name: str) -> bool:
        return self._nodes[name].ends[0] == len(self._layers)

    # --- what follows from it

    def _repair(self, number: int, reason: str) -> Iterator[PipelineAction]:
        """Reconfigure a pipeline that lost members with the rest, or tear it down."""
        before = self._pipelines[number]
        members = self._members(before)
        whole = tuple(node.name for node in members if node.whole)
        if whole:  # faster there than by stages that must recompute
            yield self._teardown(before, f"{reason}; {_named(whole)} serve alone")
            return
        pool = [*members, *self._free()]
        covers = self._best(pool)
        if not covers:
            yield self._teardown(before, f"{reason}; {self._why_no_cover(pool)}")
            return
        yield from self._replace(before, covers, f"{reason}; {_named(covers[0].nodes)} serve on")

    def _promote(self, whole: Sequence[_LoadingNode]) -> Iterator[PipelineAction]:
        """Promote nodes that hold all layers."""
        for place, node in enumerate(whole):
            sharers = 1
            if node.pipeline is not None:
                pipeline = self._pipelines[node.pipeline]
                members = self._members(pipeline)
                sharers = sum(not member.whole or member in whole[place:] for member in members)
                # It has less time for its stage from now on.
                self._pipelines[node.pipeline] = replace(pipeline, rate=self._shared_rate(pipeline))
            yield Promote(
                node=node.name,
                pipeline=node.pipeline,
                sharers=sharers,
                reason=f"{node.name} holds all layers",
            )

    def _end(self) -> Iterator[PipelineAction]:
        """Tear down pipelines of promoted nodes only."""
        for pipeline in self.pipelines:
            if all(node.whole for node in self._members(pipeline)):
                yield self._teardown(pipeline, "all its nodes hold all layers")

    def _create_from_free(self) -> Iterator[PipelineAction]:
        """Create pipelines of as few free nodes as possible, or one of more nodes with a much higher rate.

        Reconfiguring soon after would recompute all that runs by then.
        """
        pool = self._free()
        covers = self._minimal_covers(pool)
        if covers and self._settings.gain < inf and len(pool) > len(covers[0].nodes):
            together = most_even(self._layers, _candidates(pool), min(len(pool), self._settings.max_stages))
            if together is not None and self._rate(together) >= _WIDER_GAIN * self._total_rate(covers):
                covers = [together]
        for cover in covers:
            yield self._create(cover, f"{_named(cover.nodes)} hold all layers between them")

    def _improve(self) -> Iterator[PipelineAction]:
        """Reconfigure pipelines whose gain in rate is worth recomputing the KV cache.

        Those with a promoted member are about to end, and those being opened do not serve yet.
        """
        gain = self._settings.gain
        for before in self.pipelines if gain < inf else ():
            members = self._members(before)
            pool = [*members, *self._free()]
            if before.number in self._opening or any(node.whole for node in members):
                continue
            held = sum(node.layers for node in members) / (len(members) * len(self._layers))
            needed = before.rate * (1 + (gain - 1) * max(1.0, held / (1 - held)))
            most = sum(node.speed for node in pool) / (1 + 2 * self._settings.hop_cost)
            if most < needed or not self._is_worth_searching(before, pool):
                continue
            covers = self._best(pool)
            rate = self._total_rate(covers)
            if rate >= needed:
                yield from self._replace(
                    before, covers, f"it could serve {rate:.2f} nodes' worth instead of {before.rate:.2f}"
                )

    def _is_worth_searching(self, pipeline: PlannedPipeline, pool: Sequence[_LoadingNode]) -> bool:
        """Return whether the pool holds enough more than at the last search, which takes milliseconds."""
        names, held = frozenset(node.name for node in pool), sum(node.layers for node in pool)
        known = self._searched.get(pipeline.number)
        if known is not None and known[0] == names and held < _GROWTH * known[1]:
            return False
        self._searched[pipeline.number] = names, held
        return True

    # --- carrying it out

    def _create(self, cover: StageCover, reason: str) -> Create:
        pipeline = PlannedPipeline(
            number=self._next_number, epoch=0, stages=cover.stages, rate=self._rate(cover)
        )
        self._next_number += 1
        self._assign(pipeline)
        return Create(pipeline=pipeline, reason=reason)

    def _replace(
        self, before: PlannedPipeline, covers: Sequence[StageCover], reason: str
    ) -> Iterator[PipelineAction]:
        """Replace a pipeline by the first cover, which keeps its requests, and create the others."""
        first = covers[0]
        pipeline = replace(before, epoch=before.epoch + 1, stages=first.stages, rate=self._rate(first))
        self._release(before)
        self._assign(pipeline)
        yield Reconfigure(pipeline=pipeline, before=before, reason=reason)
        for cover in covers[1:]:
            yield self._create(cover, reason)

    def _teardown(self, pipeline: PlannedPipeline, reason: str) -> Teardown:
        self._release(pipeline)
        del self._pipelines[pipeline.number]
        self._searched.pop(pipeline.number, None)
        self._opening.discard(pipeline.number)
        return Teardown(pipeline=pipeline, reason=reason)

    def _assign(self, pipeline: PlannedPipeline) -> None:
        self._pipelines[pipeline.number] = pipeline
        for name in pipeline.nodes:
            assert self._nodes[name].pipeline is None, (name, pipeline)
            self._nodes[name].pipeline = pipeline.number

    def _release(self, pipeline: PlannedPipeline) -> None:
        for node in self._members(pipeline):
            node.pipeline = None

    # --- what could be

    def _members(self, pipeline: PlannedPipeline) -> list[_LoadingNode]:
        """Return the members that are left; a restarted node is another one."""
        nodes = [self._nodes[name] for name in pipeline.nodes if name in self._nodes]
        return [node for node in nodes if node.pipeline == pipeline.number]

    def _free(self) -> list[_LoadingNode]:
        """Return the nodes that hold some layers, are in no pipeline and are not promoted."""
        nodes = self._nodes.values()
        return [node for node in nodes if node.pipeline is None and not node.whole and node.layers]

    def _best(self, pool: Sequence[_LoadingNode]) -> list[StageCover]:
        """Return one cover of all the nodes, or several minimal ones: the higher total rate."""
        most = min(len(pool), self._settings.max_stages)
        together = most_even(self._layers, _candidates(pool), most)
        return [] if together is None else max([together], self._minimal_covers(pool), key=self._total_rate)

    def _minimal_covers(self, pool: Sequence[_LoadingNode]) -> list[StageCover]:
        left, covers = list(pool), list[StageCover]()
        while (cover := fewest_hops(self._layers, _candidates(left), self._settings.max_stages)) is not None:
            covers.append(cover)
            left = [node for node in left if node.name not in cover.nodes]
        return covers

    def _why_no_cover(self, pool: Collection[_LoadingNode]) -> str:
        """Return why these nodes form no pipeline."""
        for layer in range(len(self._layers)):
            if all(node.ends[layer] == layer for node in pool):
                return f"no free node holds layer {layer}"
        return "the free nodes hold all layers in too many pieces"

    # --- what it would serve

    def _rate(self, cover: StageCover) -> float:
        return 1.0 / (cover.slowest / self._layers.until[-1] + self._settings.hop_cost)

    def _total_rate(self, covers: Iterable[StageCover]) -> float:
        return sum(self._rate(cover) for cover in covers)

    def _stage_cost(self, pipeline: PlannedPipeline, name: str) -> float:
        """Return the cost of the node's stage as a fraction of a step on one node."""
        until = self._layers.until
        stage = next(stage for stage in pipeline.stages if stage.node == name)
        return (until[stage.last] - until[stage.first]) / until[-1] + self._settings.hop_cost

    def _shared_rate(self, pipeline: PlannedPipeline) -> float:
        """Return the rate while promoted members spend only a share of their time on their stages."""
        return min(
            node.speed * (_STAGE_SHARE if node.whole else 1.0) / self._stage_cost(pipeline, node.name)
            for node in self._members(pipeline)
        )


def _final_actions(actions: Sequence[PipelineAction]) -> tuple[PipelineAction, ...]:
    """Keep only the final state of each pipeline, so that no transient stages are set up."""
    kept: dict[object, PipelineAction] = {}
    for action in actions:
        if isinstance(action, Reconfigure):
            first = kept.pop(action.pipeline.number, action)
            if isinstance(first, Create):
                action = Create(pipeline=action.pipeline, reason=action.reason)
            elif isinstance(first, Reconfigure):
                action = replace(action, before=first.before)
        kept[action.pipeline.number if isinstance(action, Create | Reconfigure) else action] = action
    return tuple(kept.values())


def _candidates(nodes: Iterable[_LoadingNode]) -> list[StageCandidate]:
    return [StageCandidate(node=one.name, group=one.group, ends=one.ends, speed=one.speed) for one in nodes]


def _named(nodes: Sequence[str]) -> str:
    return " and ".join(nodes) if len(nodes) < 4 else f"{len(nodes)} nodes"
