"""Execution pipelines while a model spreads, from what the loading nodes hold (pure; FaaScale's Algorithm 2).

As soon as nodes that serve in no pipeline hold all layers between them, they form one: as few of them as can,
or more where these would serve much more at once, of different sub-groups where that is possible, with ranges
of like cost. A pipeline is formed anew when a member goes, or when it could serve `gain` times as much: with
nodes that no pipeline could be formed of, with ranges that have become possible, or as several shorter ones.
A node that has everything serves alone at once, and takes its share of what its pipeline runs; for the rest
it remains a member, until all members are whole, so that each request moves once. A node is in one pipeline
at most.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from gateway.model_layers import ModelLayers
from gateway.pipeline_actions import (
    Action,
    Alone,
    Dissolve,
    Event,
    Form,
    Holds,
    Loading,
    Opened,
    Opening,
    Pipeline,
    Reform,
)
from gateway.stage_cover import Candidate, Cover, fewest_hops, most_even

_GROWTH = 1.1  # what nodes must hold more of before better pipelines are looked for among them
_MUCH_MORE = 1.2
_SHARED = 0.5  # of its time a whole node gives to its stage while it serves alone too


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """`hop_cost` is what handing on costs a stage, as a part of a step on one whole node (1 ms of 20). A
    pipeline has at most `most_hops` stages. It is formed anew for `gain` times its rate, once its members
    hold more than half of the model for more than that: the better one serves for a shorter time then, and
    has more to compute anew. Never where that is infinite."""

    hop_cost: float = 0.05
    most_hops: int = 8
    gain: float = 1.5


@dataclass(slots=True)
class _Node:
    """What is known of a node: `ends` tells which layers it can run, `layers` how many."""

    name: str
    group: int
    speed: float
    ends: tuple[int, ...]
    blocks: int = 0
    layers: int = 0
    whole: bool = False
    pipeline: int | None = None


class Pipelines:
    """The pipelines of one model image; `hear` takes what happened and answers what to do."""

    def __init__(self, layers: ModelLayers, settings: PipelineSettings | None = None) -> None:
        self._layers = layers
        self._settings = settings or PipelineSettings()
        self._nodes: dict[str, _Node] = {}
        self._pipelines: dict[int, Pipeline] = {}
        self._looked: dict[int, tuple[frozenset[str], int]] = {}  # by number: at whom, holding how much
        self._opening: set[int] = set()  # numbers
        self._next_number = 0

    def __repr__(self) -> str:
        return f"<Pipelines {[*self._pipelines.values()]!r}, whole {list(self.whole)!r}>"

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Those that serve, the oldest first."""
        return tuple(self._pipelines.values())

    @property
    def whole(self) -> tuple[str, ...]:
        """Nodes that serve alone."""
        return tuple(node.name for node in self._nodes.values() if node.whole)

    def hear(self, events: Iterable[Event]) -> tuple[Action, ...]:
        """What is to be done after these events, which came together: one change, of all nodes at once."""
        lost: dict[int, list[str]] = {}
        changed: dict[str, None] = {}
        left = False
        for event in events:
            if isinstance(event, Loading):
                self._join(event)
            elif isinstance(event, Holds):
                if self._hold(event):
                    changed[event.node] = None
            elif isinstance(event, Opening):
                self._opening.add(event.pipeline)
            elif isinstance(event, Opened):
                self._opening.discard(event.pipeline)
            elif event.node in self._nodes:
                left = True
                changed.pop(event.node, None)
                pipeline = self._nodes.pop(event.node).pipeline
                if pipeline is not None:
                    lost.setdefault(pipeline, []).append(f"{event.node} is gone ({event.reason})")
        whole = [self._nodes[name] for name in changed if self._is_whole(name)]
        for node in whole:
            node.whole = True
        actions: list[Action] = [*self._switch(whole)]
        for number, reasons in lost.items():
            actions.extend(self._repair(number, ", ".join(reasons)))
        actions.extend(self._end())
        if changed or left:
            actions.extend(self._form_free())
            actions.extend(self._improve())
        return _last_words(actions)

    # --- what nodes hold

    def _join(self, event: Loading) -> None:
        """A node that is known already begins to load; one that came back was `Gone` before."""
        known = _Node(event.node, event.group, event.speed, self._layers.ends(0))
        self._nodes.setdefault(event.node, known)

    def _hold(self, event: Holds) -> bool:
        """Whether the node can run more than before."""
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

    def _repair(self, number: int, reason: str) -> Iterator[Action]:
        """A pipeline that lost members goes on with those that are left, or ends."""
        before = self._pipelines[number]
        members = self._members(before)
        whole = tuple(node.name for node in members if node.whole)
        if whole:  # they hold everything: sooner there than by stages that must be filled again
            yield self._dissolve(before, f"{reason}; {_named(whole)} serve on alone")
            return
        pool = [*members, *self._free()]
        covers = self._best(pool)
        if not covers:
            yield self._dissolve(before, f"{reason}; {self._lacking(pool)}")
            return
        yield from self._replace(before, covers, f"{reason}; {_named(covers[0].nodes)} serve on")

    def _switch(self, whole: Sequence[_Node]) -> Iterator[Action]:
        """Nodes that have everything serve alone."""
        for place, node in enumerate(whole):
            sharers = 1
            if node.pipeline is not None:
                pipeline = self._pipelines[node.pipeline]
                members = self._members(pipeline)
                sharers = sum(not member.whole or member in whole[place:] for member in members)
                # It has less time for its stage now.
                self._pipelines[node.pipeline] = replace(pipeline, rate=self._rate_now(pipeline))
            yield Alone(
                node=node.name,
                pipeline=node.pipeline,
                sharers=sharers,
                reason=f"{node.name} holds all layers",
            )

    def _end(self) -> Iterator[Action]:
        """A pipeline of nodes that all serve alone has done its part."""
        for pipeline in self.pipelines:
            if all(node.whole for node in self._members(pipeline)):
                yield self._dissolve(pipeline, "all its nodes hold all layers")

    def _form_free(self) -> Iterator[Action]:
        """Of as few free nodes as can; of more where these would serve much more already, since to form it
        anew soon after would cost what runs by then."""
        pool = self._free()
        covers = self._parted(pool)
        if covers and self._settings.gain < inf and len(pool) > len(covers[0].nodes):
            together = most_even(self._layers, _candidates(pool), min(len(pool), self._settings.most_hops))
            if together is not None and self._rate(together) >= _MUCH_MORE * self._total_rate(covers):
                covers = [together]
        for cover in covers:
            yield self._form(cover, f"{_named(cover.nodes)} hold all layers between them")

    def _improve(self) -> Iterator[Action]:
        """Form pipelines anew that could serve so much more that computing keys and values again is worth it.

        Those with a whole member are about to end, and others do not serve yet.
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
            if most < needed or not self._worth_a_look(before, pool):
                continue
            covers = self._best(pool)
            rate = self._total_rate(covers)
            if rate >= needed:
                yield from self._replace(
                    before, covers, f"it could serve {rate:.2f} nodes' worth instead of {before.rate:.2f}"
                )

    def _worth_a_look(self, pipeline: Pipeline, pool: Sequence[_Node]) -> bool:
        """Whether the pool holds enough more than when it was looked at last: looking takes milliseconds."""
        names, held = frozenset(node.name for node in pool), sum(node.layers for node in pool)
        known = self._looked.get(pipeline.number)
        if known is not None and known[0] == names and held < _GROWTH * known[1]:
            return False
        self._looked[pipeline.number] = names, held
        return True

    # --- carrying it out

    def _form(self, cover: Cover, reason: str) -> Form:
        pipeline = Pipeline(number=self._next_number, epoch=0, stages=cover.stages, rate=self._rate(cover))
        self._next_number += 1
        self._assign(pipeline)
        return Form(pipeline=pipeline, reason=reason)

    def _replace(self, before: Pipeline, covers: Sequence[Cover], reason: str) -> Iterator[Action]:
        """The first cover goes on with the number and the requests; the others are new pipelines."""
        first = covers[0]
        pipeline = replace(before, epoch=before.epoch + 1, stages=first.stages, rate=self._rate(first))
        self._release(before)
        self._assign(pipeline)
        yield Reform(pipeline=pipeline, before=before, reason=reason)
        for cover in covers[1:]:
            yield self._form(cover, reason)

    def _dissolve(self, pipeline: Pipeline, reason: str) -> Dissolve:
        self._release(pipeline)
        del self._pipelines[pipeline.number]
        self._looked.pop(pipeline.number, None)
        self._opening.discard(pipeline.number)
        return Dissolve(pipeline=pipeline, reason=reason)

    def _assign(self, pipeline: Pipeline) -> None:
        self._pipelines[pipeline.number] = pipeline
        for name in pipeline.nodes:
            assert self._nodes[name].pipeline is None, (name, pipeline)
            self._nodes[name].pipeline = pipeline.number

    def _release(self, pipeline: Pipeline) -> None:
        for node in self._members(pipeline):
            node.pipeline = None

    # --- what could be

    def _members(self, pipeline: Pipeline) -> list[_Node]:
        """Those that are left; one that came back under its name is another node."""
        nodes = [self._nodes[name] for name in pipeline.nodes if name in self._nodes]
        return [node for node in nodes if node.pipeline == pipeline.number]

    def _free(self) -> list[_Node]:
        """Nodes that hold some layers and serve neither alone nor in a pipeline."""
        nodes = self._nodes.values()
        return [node for node in nodes if node.pipeline is None and not node.whole and node.layers]

    def _best(self, pool: Sequence[_Node]) -> list[Cover]:
        """One pipeline of all the nodes or several of as few as can be: what serves more."""
        most = min(len(pool), self._settings.most_hops)
        together = most_even(self._layers, _candidates(pool), most)
        return [] if together is None else max([together], self._parted(pool), key=self._total_rate)

    def _parted(self, pool: Sequence[_Node]) -> list[Cover]:
        left, covers = list(pool), list[Cover]()
        while (cover := fewest_hops(self._layers, _candidates(left), self._settings.most_hops)) is not None:
            covers.append(cover)
            left = [node for node in left if node.name not in cover.nodes]
        return covers

    def _lacking(self, pool: Collection[_Node]) -> str:
        """Why these nodes form no pipeline."""
        for layer in range(len(self._layers)):
            if all(node.ends[layer] == layer for node in pool):
                return f"nobody who is free holds layer {layer}"
        return "those who are free hold all layers in too many pieces"

    # --- what it would serve

    def _rate(self, cover: Cover) -> float:
        return 1.0 / (cover.slowest / self._layers.until[-1] + self._settings.hop_cost)

    def _total_rate(self, covers: Iterable[Cover]) -> float:
        return sum(self._rate(cover) for cover in covers)

    def _stage_cost(self, pipeline: Pipeline, name: str) -> float:
        """The node's stage as a part of a step on one whole node."""
        until = self._layers.until
        stage = next(stage for stage in pipeline.stages if stage.node == name)
        return (until[stage.last] - until[stage.first]) / until[-1] + self._settings.hop_cost

    def _rate_now(self, pipeline: Pipeline) -> float:
        """The rate where whole members give their stages only a part of their time."""
        return min(
            node.speed * (_SHARED if node.whole else 1.0) / self._stage_cost(pipeline, node.name)
            for node in self._members(pipeline)
        )


def _last_words(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Of what one pipeline is to become at once only the last: nobody sets up stages that do not stay."""
    kept: dict[object, Action] = {}
    for action in actions:
        if isinstance(action, Reform):
            first = kept.pop(action.pipeline.number, action)
            if isinstance(first, Form):
                action = Form(pipeline=action.pipeline, reason=action.reason)
            elif isinstance(first, Reform):
                action = replace(action, before=first.before)
        kept[action.pipeline.number if isinstance(action, Form | Reform) else action] = action
    return tuple(kept.values())


def _candidates(nodes: Iterable[_Node]) -> list[Candidate]:
    return [Candidate(node=one.name, group=one.group, ends=one.ends, speed=one.speed) for one in nodes]


def _named(nodes: Sequence[str]) -> str:
    return " and ".join(nodes) if len(nodes) < 4 else f"{len(nodes)} nodes"
