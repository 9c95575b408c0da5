"""ZigZag pairs of one function version: loading instances that help ready ones (pure; BlitzScale).

A pair is a target, which loads, and a source, which is ready and takes the calls of both; each is in at most
one pair. It starts with the target's first layer and ends when the target is ready. Pairs are published as
pipelines.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gateway.live.group import ClosePipeline, StartPipeline
from registry.records.live import LiveMode, LivePipeline, LiveStage

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
    layers: int = 0
    pair: LivePipeline | None = None
    failed: bool = False


def pair_rate(layers: int, total: int) -> float:
    """Return the rate of a pair in whole nodes, when the target runs `layers` and the source the others.

    It is at most two, from half of the layers on: the target need not run all that it holds.
    """
    source = (total - layers) / total
    return _MAX_RATE if source * _MAX_RATE <= 1 else int(1 / source / _RATE_STEP) * _RATE_STEP


class ZigZagPairs:
    """The pairs of a model with `layers` layers: each method returns actions in order."""

    def __init__(self, layers: int, max_concurrency: int, new_id: Callable[[], str]) -> None:
        self._layers = layers
        self._slots = 2 * max_concurrency  # the target works on waiting calls
        self._new_id = new_id
        self._targets: dict[str, _PairTarget] = {}  # by node
        self._sources: dict[str, str] = {}  # nodes by instance
        self._refused: set[str] = set()  # instances that failed as sources

    def __repr__(self) -> str:
        pairs = [target.pair for target in self._targets.values() if target.pair is not None]
        return f"<ZigZagPairs {pairs!r}, {len(self._targets)} load, {len(self._sources)} are ready>"

    @property
    def is_over(self) -> bool:
        return not self._targets

    def add(self, node: str, instance_id: str, group: int) -> tuple[PairAction, ...]:
        """Add an instance that starts to load; its block order (`group`) does not matter."""
        actions = tuple(self._end(node, "it restarted"))
        self._targets[node] = _PairTarget(node, instance_id)
        return (*actions, *self._pair())

    def on_layers(self, node: str, instance_id: str, layers: int) -> tuple[PairAction, ...]:
        """Record the bitfield of layers that can run there.

        Only a run from the first one counts, without the last layer, which the source runs.
        """
        target = self._known(node, instance_id)
        if target is None:
            return ()
        run = (~layers & (layers + 1)).bit_length() - 1  # ones from the lowest bit on
        target.layers = max(target.layers, min(run, self._layers - 1))
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
                if node == target.node:
                    target.failed = True
                else:
                    self._refused.add(_source_of(pair))
        return tuple(self._pair())

    def set_sources(self, ready: Mapping[str, str]) -> tuple[PairAction, ...]:
        """Update the ready instances, given with their nodes."""
        self._sources = dict(ready)
        self._refused &= ready.keys()
        actions: list[PairAction] = []
        for target in self._targets.values():
            if target.pair is not None and _source_of(target.pair) not in ready:
                actions.append(_close(target.pair, f"{target.pair.stages[-1].node} serves no more"))
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
        """Pair free targets with free sources, most layers first."""
        able = [one for one in self._targets.values() if self._can_help(one)]
        paired = [one.pair for one in self._targets.values() if one.pair is not None]
        busy = {stage.instance_id for pair in paired for stage in pair.stages}
        free = [one for one in self._sources if one not in busy and one not in self._refused]
        targets = sorted(able, key=lambda one: -one.layers)
        for target, source in zip(targets, free, strict=False):
            target.pair = self._new_pair(target, source)
            helped = self._sources[source]
            reason = f"{target.node} holds {target.layers} of {self._layers} layers to help {helped}"
            yield StartPipeline(pipeline=target.pair, reason=reason)

    def _can_help(self, target: _PairTarget) -> bool:
        is_ready = target.instance_id in self._sources  # its ready event is about to arrive
        return target.pair is None and target.layers > 0 and not target.failed and not is_ready

    def _updated(self, target: _PairTarget) -> Iterator[PairAction]:
        """Publish a higher rate of the pair."""
        before = target.pair
        if before is not None and pair_rate(target.layers, self._layers) > before.rate:
            target.pair = self._new_pair(target, _source_of(before), before.pipeline_id)
            yield UpdatePair(pipeline=target.pair)

    def _new_pair(self, target: _PairTarget, source: str, pipeline_id: str = "") -> LivePipeline:
        last = self._layers - 1
        return LivePipeline(
            pipeline_id=pipeline_id or self._new_id(),
            epoch=0,
            stages=(
                LiveStage(node=target.node, instance_id=target.instance_id, first=0, last=last),
                LiveStage(node=self._sources[source], instance_id=source, first=last, last=self._layers),
            ),
            head=1,
            rate=pair_rate(target.layers, self._layers),
            slots=self._slots,
            way=LiveMode.ZIGZAG,
        )


def _source_of(pair: LivePipeline) -> str:
    return pair.stages[-1].instance_id


def _close(pair: LivePipeline, reason: str) -> ClosePipeline:
    return ClosePipeline(pipeline_id=pair.pipeline_id, reason=reason)
