"""One function version's starts that help instances which are ready already: pure decisions.

A pair is a target, which loads, and a source, which has everything and takes the calls of both; each is in
one pair at most. It begins with the target's first layer, and ends when the target is ready: then each serves
alone. It speaks of pairs as of pipelines, and answers what to do as LiveGroup does.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gateway.live_group import Close, Open
from registry.live import Live, LivePipeline, LiveStage

_STEP = 0.25  # of a rate: it is told anew when it has grown by that
_MOST = 2.0  # what two whole nodes serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The pair that is open is told of as this by now."""

    pipeline: LivePipeline


PairTodo = Open | Grown | Close


@dataclass(slots=True)
class _Target:
    """A node that loads; `layers` are those from the first one on that can run there."""

    node: str
    instance_id: str
    layers: int = 0
    pair: LivePipeline | None = None
    failed: bool = False


def rate_of(layers: int, of_all: int) -> float:
    """What a pair serves, in whole nodes, when the target runs so many layers and the source the others: no
    more than two nodes, which it does from the middle on, as the target need not run all that it can."""
    source = (of_all - layers) / of_all
    return _MOST if source * _MOST <= 1 else int(1 / source / _STEP) * _STEP


class ZigZagPairs:
    """Of a model of so many layers, whose instances take `max_concurrency` calls each. Each method takes what
    happened and answers what is to be done, in order."""

    def __init__(self, layers: int, max_concurrency: int, new_id: Callable[[], str]) -> None:
        self._layers = layers
        self._slots = 2 * max_concurrency  # those that wait are what the target works on
        self._new_id = new_id
        self._targets: dict[str, _Target] = {}  # by node
        self._sources: dict[str, str] = {}  # instance -> node
        self._refused: set[str] = set()  # sources that could not be one

    def __repr__(self) -> str:
        pairs = [target.pair for target in self._targets.values() if target.pair is not None]
        return f"<ZigZagPairs {pairs!r}, {len(self._targets)} load, {len(self._sources)} are ready>"

    @property
    def is_over(self) -> bool:
        return not self._targets

    def begin(self, node: str, instance_id: str, group: int) -> tuple[PairTodo, ...]:
        """An instance begins to load; in which order (`group`) is nothing to a pair."""
        todos = tuple(self._end(node, "it begins anew"))
        self._targets[node] = _Target(node, instance_id)
        return (*todos, *self._pair())

    def holds(self, node: str, instance_id: str, layers: int) -> tuple[PairTodo, ...]:
        """The layers, as bits, can run there; only those from the first one on help. The last one is left to
        the source."""
        target = self._known(node, instance_id)
        if target is None:
            return ()
        run = (~layers & (layers + 1)).bit_length() - 1  # ones from the lowest bit on
        target.layers = max(target.layers, min(run, self._layers - 1))
        return (*self._grown(target), *self._pair())

    def ready(self, node: str, instance_id: str) -> tuple[PairTodo, ...]:
        return self._over(node, instance_id, f"{node} holds all layers")

    def gone(self, node: str, instance_id: str, reason: str) -> tuple[PairTodo, ...]:
        """The instance is gone, or cannot be a target any more."""
        return self._over(node, instance_id, f"{node} is gone ({reason})")

    def lost(self, pipeline_id: str, epoch: int, node: str, reason: str) -> tuple[PairTodo, ...]:
        """A pair ended by itself, since that member failed it, which is in none from now on."""
        for target in self._targets.values():
            pair = target.pair
            if pair is not None and (pair.pipeline_id, pair.epoch) == (pipeline_id, epoch):
                target.pair = None
                if node == target.node:
                    target.failed = True
                else:
                    self._refused.add(_source_of(pair))
        return tuple(self._pair())

    def sources(self, ready: Mapping[str, str]) -> tuple[PairTodo, ...]:
        """The instances that are ready now, and their nodes."""
        self._sources = dict(ready)
        self._refused &= ready.keys()
        todos: list[PairTodo] = []
        for target in self._targets.values():
            if target.pair is not None and _source_of(target.pair) not in ready:
                todos.append(_close(target.pair, f"{target.pair.stages[-1].node} serves no longer"))
                target.pair = None
        return (*todos, *self._pair())

    # --- inside

    def _known(self, node: str, instance_id: str) -> _Target | None:
        target = self._targets.get(node)
        return target if target is not None and target.instance_id == instance_id else None

    def _over(self, node: str, instance_id: str, reason: str) -> tuple[PairTodo, ...]:
        if self._known(node, instance_id) is None:
            return ()
        return (*self._end(node, reason), *self._pair())

    def _end(self, node: str, reason: str) -> Iterator[PairTodo]:
        target = self._targets.pop(node, None)
        if target is not None and target.pair is not None:
            yield _close(target.pair, reason)

    def _pair(self) -> Iterator[PairTodo]:
        """Whoever has most layers helps first."""
        able = [one for one in self._targets.values() if self._can_help(one)]
        paired = [one.pair for one in self._targets.values() if one.pair is not None]
        busy = {stage.instance_id for pair in paired for stage in pair.stages}
        free = [one for one in self._sources if one not in busy and one not in self._refused]
        targets = sorted(able, key=lambda one: -one.layers)
        for target, source in zip(targets, free, strict=False):
            target.pair = self._made(target, source)
            helped = self._sources[source]
            reason = f"{target.node} has {target.layers} of {self._layers} layers to help {helped} with"
            yield Open(pipeline=target.pair, reason=reason)

    def _can_help(self, target: _Target) -> bool:
        is_ready = target.instance_id in self._sources  # which is told of any moment
        return target.pair is None and target.layers > 0 and not target.failed and not is_ready

    def _grown(self, target: _Target) -> Iterator[PairTodo]:
        """Say what the pair serves by now; it stays the same one."""
        before = target.pair
        if before is not None and rate_of(target.layers, self._layers) > before.rate:
            target.pair = self._made(target, _source_of(before), before.pipeline_id)
            yield Grown(pipeline=target.pair)

    def _made(self, target: _Target, source: str, pipeline_id: str = "") -> LivePipeline:
        last = self._layers - 1
        return LivePipeline(
            pipeline_id=pipeline_id or self._new_id(),
            epoch=0,
            stages=(
                LiveStage(node=target.node, instance_id=target.instance_id, first=0, last=last),
                LiveStage(node=self._sources[source], instance_id=source, first=last, last=self._layers),
            ),
            head=1,
            rate=rate_of(target.layers, self._layers),
            slots=self._slots,
            way=Live.ZIGZAG,
        )


def _source_of(pair: LivePipeline) -> str:
    return pair.stages[-1].instance_id


def _close(pair: LivePipeline, reason: str) -> Close:
    return Close(pipeline_id=pair.pipeline_id, reason=reason)
