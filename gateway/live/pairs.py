"""Layer-wise prefill on the loading instances of one function version (pure; BlitzScale's ZigZag pairs).

A pair is a target, which loads, and a source, which takes the calls of both; each is in at most one pair. The
source is a ready instance, or the target itself: then it admits calls while it loads, and replies once it is
ready. A pair ends when its target is ready. Pairs are published as pipelines.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from gateway.live.group import ClosePipeline, StartPipeline
from registry.records.live import LiveMode, LivePipeline, LiveStage

# The fraction of layers with which a node that is alone admits calls: prefill takes less than the rest of the
# load. Where ready instances have free slots it is later, since these may end a call sooner.
ADMIT, _ADMIT_LATE = 0.5, 0.875
_RATE_STEP = 0.25  # growth of a rate that is published
_MAX_RATE = 2.0  # the rate of two ready nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePair:
    """Publish the new rate of an open pair."""

    pipeline: LivePipeline


PairAction = StartPipeline | UpdatePair | ClosePipeline


@dataclass(slots=True)
class _PairTarget:
    """A node that loads; `layers` is the length of the runnable run from the first one."""

    node: str
    instance_id: str
    place: int = 0  # in its sub-group of the cast
    layers: int = 0
    pair: LivePipeline | None = None
    failed: bool = False


def pair_rate(layers: int, total: int) -> float:
    """Return the rate of a pair in whole nodes, when the target runs `layers` and the source the others.

    It is at most two, from half of the layers on: the target need not run all that it holds.
    """
    source = (total - layers) / total
    return _MAX_RATE if source * _MAX_RATE <= 1 else int(1 / source / _RATE_STEP) * _RATE_STEP


class PairGroup:
    """The pairs of a model with `layers` layers: each method returns actions in order.

    With `alone` each node is a pair with itself, for loads in one block order, of which no pipeline could
    serve before the first is ready.
    """

    def __init__(
        self, layers: int, max_concurrency: int, new_id: Callable[[], str], *, alone: bool = False
    ) -> None:
        self._layers = layers
        self._max_concurrency = max_concurrency
        self._new_id = new_id
        self._alone = alone
        self._has_room = False  # a ready instance has a free slot
        self._targets: dict[str, _PairTarget] = {}  # by node
        self._sources: dict[str, str] = {}  # nodes by instance
        self._refused: set[str] = set()  # instances that failed as sources

    def __repr__(self) -> str:
        pairs = [target.pair for target in self._targets.values() if target.pair is not None]
        return f"<PairGroup {pairs!r}, {len(self._targets)} load, {len(self._sources)} are ready>"

    @property
    def is_over(self) -> bool:
        return not self._targets

    def add(self, node: str, instance_id: str, group: int, place: int = 0) -> tuple[PairAction, ...]:
        """Add an instance that starts to load; its block order (`group`) does not matter."""
        actions = tuple(self._end(node, "it restarted"))
        self._targets[node] = _PairTarget(node, instance_id, place)
        return (*actions, *self._pair())

    def on_layers(self, node: str, instance_id: str, layers: int) -> tuple[PairAction, ...]:
        """Record the bitfield of layers that can run there; only a run from the first one counts."""
        target = self._known(node, instance_id)
        if target is None:
            return ()
        run = (~layers & (layers + 1)).bit_length() - 1  # ones from the lowest bit on
        target.layers = max(target.layers, run)
        return (*self._updated(target), *self._pair())

    def on_ready(self, node: str, instance_id: str) -> tuple[PairAction, ...]:
        return self._over(node, instance_id, f"{node} holds all layers")

    def remove(self, node: str, instance_id: str, reason: str) -> tuple[PairAction, ...]:
        """Remove an instance that failed, was stopped or cannot be a target."""
        return self._over(node, instance_id, f"{node} is lost ({reason})")

    def on_lost(self, pipeline_id: str, epoch: int, node: str, reason: str) -> tuple[PairAction, ...]:
        """Record that a pair failed because of a member, which is in no pair from now on."""
        for target in self._targets.values():
            pair = target.pair
            if pair is not None and (pair.pipeline_id, pair.epoch) == (pipeline_id, epoch):
                target.pair = None
                if pair.source is None or node == target.node:
                    target.failed = True
                else:
                    self._refused.add(pair.source.instance_id)
        return tuple(self._pair())

    def set_ready(self, ready: Mapping[str, str], *, has_room: bool = False) -> tuple[PairAction, ...]:
        """Update the ready instances, given with their nodes, and whether one has a free slot."""
        self._sources, self._has_room = dict(ready), has_room
        self._refused &= ready.keys()
        actions: list[PairAction] = []
        for target in self._targets.values():
            source = target.pair.source if target.pair is not None else None
            if target.pair is not None and source is not None and source.instance_id not in ready:
                actions.append(_close(target.pair, f"{source.node} serves no more"))
                target.pair = None
        return (*actions, *self._pair())

    # --- inside

    def _known(self, node: str, instance_id: str) -> _PairTarget | None:
        target = self._targets.get(node)
        return target if target is not None and target.instance_id == instance_id else None

    def _over(self, node: str, instance_id: str, reason: str) -> tuple[PairAction, ...]:
        if self._known(node, instance_id) is None:
            return ()
        return (*self._end(node, reason), *self._pair())

    def _end(self, node: str, reason: str) -> Iterator[PairAction]:
        target = self._targets.pop(node, None)
        if target is not None and target.pair is not None:
            yield _close(target.pair, reason)

    def _pair(self) -> Iterator[PairAction]:
        """Pair free targets with free sources or with themselves.

        The last ones of a chain go first, also if others have a layer before them: nothing that they compute
        takes bandwidth from what others wait for (BlitzScale §5.2). Of equals the one with most layers does.
        """
        if self._alone:
            for target in filter(self._can_help, self._targets.values()):
                target.pair = self._new_pair(target)
                yield StartPipeline(
                    pipeline=target.pair, reason=f"{self._held(target)} for layer-wise prefill"
                )
            return
        paired = [one.pair for one in self._targets.values() if one.pair is not None]
        busy = {stage.instance_id for pair in paired for stage in pair.stages}
        free = [one for one in self._sources if one not in busy and one not in self._refused]
        waiting = [one for one in self._targets.values() if self._may_help(one)]
        waiting.sort(key=lambda one: (one.place, one.layers), reverse=True)
        able = [one for one in waiting[: len(free)] if one.layers]
        for target, source in zip(able, free, strict=False):
            target.pair = self._new_pair(target, source)
            reason = f"{self._held(target)} to help {self._sources[source]}"
            yield StartPipeline(pipeline=target.pair, reason=reason)

    def _held(self, target: _PairTarget) -> str:
        return f"{target.node} holds {target.layers} of {self._layers} layers"

    def _can_help(self, target: _PairTarget) -> bool:
        """Return whether a node that is alone can admit calls."""
        enough = self._layers * (_ADMIT_LATE if self._has_room else ADMIT)
        return target.pair is None and not target.failed and target.layers >= enough

    def _may_help(self, target: _PairTarget) -> bool:
        """Return whether a target is free to help a source, once it has a layer."""
        is_free = target.pair is None and not target.failed
        return is_free and target.instance_id not in self._sources  # its ready event is to arrive

    def _updated(self, target: _PairTarget) -> Iterator[PairAction]:
        """Publish a higher rate of the pair."""
        pair = target.pair
        if pair is not None and pair.source is not None:
            rate = pair_rate(target.layers, self._layers)
            if rate > pair.rate:
                target.pair = replace(pair, rate=rate)
                yield UpdatePair(pipeline=target.pair)

    def _new_pair(self, target: _PairTarget, source: str = "") -> LivePipeline:
        """Return a pair with a source, or of a node with itself."""
        last = self._layers - 1 if source else self._layers
        stages: tuple[LiveStage, ...] = (
            LiveStage(node=target.node, instance_id=target.instance_id, first=0, last=last),
        )
        if source:
            node = self._sources[source]
            stages = (*stages, LiveStage(node=node, instance_id=source, first=last, last=self._layers))
        return LivePipeline(
            pipeline_id=self._new_id(),
            epoch=0,
            stages=stages,
            head=len(stages) - 1,
            rate=pair_rate(target.layers, self._layers) if source else 1.0,
            slots=len(stages) * self._max_concurrency,  # the target works on waiting calls
            way=LiveMode.ZIGZAG if source else LiveMode.PIPELINE,
        )


def _close(pair: LivePipeline, reason: str) -> ClosePipeline:
    return ClosePipeline(pipeline_id=pair.pipeline_id, reason=reason)
