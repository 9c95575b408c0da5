"""One function version's starts that load in one block order, so that no pipeline of them could serve before
the first is whole: each node takes calls while it loads, and runs their prompts by layers as they land. Pure.

It speaks of each node as of a pipeline of one stage, and answers what to do as LiveGroup does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.live_group import Close, Open
from registry.live import LivePipeline, LiveStage

# Of its layers a node has so many when it takes calls: to run their prompts takes less than what is still to
# come. Where others serve and have room it takes them later, as these may be done sooner.
_BEGIN, _BEGIN_LATE = 0.5, 0.875

LoneTodo = Open | Close


@dataclass(slots=True)
class _Lone:
    """A node that loads."""

    instance_id: str
    layers: int = 0  # that can run there, from the first one on
    pipeline: LivePipeline | None = None
    failed: bool = False


class LoneGroup:
    """Of a model of so many layers, whose instances take `max_concurrency` calls each; `has_room` says
    whether one that is ready takes more. Each method takes what happened and answers what is to be done."""

    def __init__(
        self, layers: int, max_concurrency: int, new_id: Callable[[], str], has_room: Callable[[], bool]
    ) -> None:
        self._layers = layers
        self._slots = max_concurrency
        self._new_id = new_id
        self._has_room = has_room
        self._nodes: dict[str, _Lone] = {}

    def __repr__(self) -> str:
        taking = [node for node, one in self._nodes.items() if one.pipeline is not None]
        return f"<LoneGroup of {len(self._nodes)} nodes, {taking} take calls>"

    @property
    def is_over(self) -> bool:
        return not self._nodes

    def begin(self, node: str, instance_id: str, group: int) -> tuple[LoneTodo, ...]:
        """An instance begins to load."""
        todos = self._end(node, "it begins anew")
        self._nodes[node] = _Lone(instance_id)
        return todos

    def holds(self, node: str, instance_id: str, layers: int) -> tuple[LoneTodo, ...]:
        """The layers, as bits, can run there; only those from the first one on help."""
        one = self._known(node, instance_id)
        if one is None:
            return ()
        one.layers = (~layers & (layers + 1)).bit_length() - 1  # ones from the lowest bit on
        return self.look()

    def look(self) -> tuple[LoneTodo, ...]:
        """Whether any has room may be otherwise by now."""
        least = self._layers * (_BEGIN_LATE if self._has_room() else _BEGIN)
        return tuple(
            self._opened(node, one)
            for node, one in self._nodes.items()
            if one.layers >= least and one.pipeline is None and not one.failed
        )

    def ready(self, node: str, instance_id: str) -> tuple[LoneTodo, ...]:
        if self._known(node, instance_id) is None:
            return ()
        return self._end(node, f"{node} holds all layers")

    def gone(self, node: str, instance_id: str, reason: str) -> tuple[LoneTodo, ...]:
        """The instance is gone, or cannot take calls before it is ready."""
        if self._known(node, instance_id) is None:
            return ()
        return self._end(node, f"{node} is gone ({reason})")

    def lost(self, pipeline_id: str, epoch: int, node: str, reason: str) -> tuple[LoneTodo, ...]:
        """It ended by itself: its node serves once it is ready."""
        for one in self._nodes.values():
            pipeline = one.pipeline
            if pipeline is not None and (pipeline.pipeline_id, pipeline.epoch) == (pipeline_id, epoch):
                one.pipeline, one.failed = None, True
        return ()

    def _opened(self, node: str, one: _Lone) -> Open:
        stage = LiveStage(node=node, instance_id=one.instance_id, first=0, last=self._layers)
        one.pipeline = LivePipeline(
            pipeline_id=self._new_id(), epoch=0, stages=(stage,), head=0, rate=1.0, slots=self._slots
        )
        reason = f"{node} has {one.layers} of {self._layers} layers to run prompts through"
        return Open(pipeline=one.pipeline, reason=reason)

    def _known(self, node: str, instance_id: str) -> _Lone | None:
        one = self._nodes.get(node)
        return one if one is not None and one.instance_id == instance_id else None

    def _end(self, node: str, reason: str) -> tuple[LoneTodo, ...]:
        one = self._nodes.pop(node, None)
        if one is None or one.pipeline is None:
            return ()
        return (Close(pipeline_id=one.pipeline.pipeline_id, reason=reason),)
