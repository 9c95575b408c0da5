"""Layer-wise prefill on the loading instances of one function version (pure).

All of them load in one block order, so no pipeline could serve before the first is ready. Instead each node
admits calls while it loads and prefills them layer by layer as layers arrive. It is published as a pipeline
of one stage.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.live.group import ClosePipeline, StartPipeline
from registry.records.live import LivePipeline, LiveStage

# The fraction of layers with which a node admits calls: prefill takes less than the rest of the load. Where
# ready instances have free slots it is later, since these may end a call sooner.
_ADMIT, _ADMIT_LATE = 0.5, 0.875

LayerwiseAction = StartPipeline | ClosePipeline


@dataclass(slots=True)
class _LayerwiseNode:
    """A node that loads."""

    instance_id: str
    layers: int = 0  # runnable from the first one on
    pipeline: LivePipeline | None = None
    failed: bool = False


class LayerwiseGroup:
    """Loading instances of a model with `layers` layers: each method returns actions in order.

    `has_room` returns whether a ready instance has a free slot.
    """

    def __init__(
        self, layers: int, max_concurrency: int, new_id: Callable[[], str], has_room: Callable[[], bool]
    ) -> None:
        self._layers = layers
        self._slots = max_concurrency
        self._new_id = new_id
        self._has_room = has_room
        self._nodes: dict[str, _LayerwiseNode] = {}

    def __repr__(self) -> str:
        taking = [node for node, one in self._nodes.items() if one.pipeline is not None]
        return f"<LayerwiseGroup of {len(self._nodes)} nodes, {taking} admit calls>"

    @property
    def is_over(self) -> bool:
        return not self._nodes

    def add(self, node: str, instance_id: str, group: int) -> tuple[LayerwiseAction, ...]:
        """Add an instance that starts to load."""
        actions = self._end(node, "it restarted")
        self._nodes[node] = _LayerwiseNode(instance_id)
        return actions

    def on_layers(self, node: str, instance_id: str, layers: int) -> tuple[LayerwiseAction, ...]:
        """Record the bitfield of layers that can run there; only a run from the first one counts."""
        one = self._known(node, instance_id)
        if one is None:
            return ()
        one.layers = (~layers & (layers + 1)).bit_length() - 1  # ones from the lowest bit on
        return self.refresh()

    def refresh(self) -> tuple[LayerwiseAction, ...]:
        """Open nodes that hold enough layers, given the free slots of ready instances."""
        least = self._layers * (_ADMIT_LATE if self._has_room() else _ADMIT)
        return tuple(
            self._opened(node, one)
            for node, one in self._nodes.items()
            if one.layers >= least and one.pipeline is None and not one.failed
        )

    def on_ready(self, node: str, instance_id: str) -> tuple[LayerwiseAction, ...]:
        if self._known(node, instance_id) is None:
            return ()
        return self._end(node, f"{node} holds all layers")

    def remove(self, node: str, instance_id: str, reason: str) -> tuple[LayerwiseAction, ...]:
        """Remove an instance that failed, was stopped or cannot serve before it is ready."""
        if self._known(node, instance_id) is None:
            return ()
        return self._end(node, f"{node} is lost ({reason})")

    def on_lost(self, pipeline_id: str, epoch: int, node: str, reason: str) -> tuple[LayerwiseAction, ...]:
        """Record that it failed: its node serves once it is ready."""
        for one in self._nodes.values():
            pipeline = one.pipeline
            if pipeline is not None and (pipeline.pipeline_id, pipeline.epoch) == (pipeline_id, epoch):
                one.pipeline, one.failed = None, True
        return ()

    def _opened(self, node: str, one: _LayerwiseNode) -> StartPipeline:
        stage = LiveStage(node=node, instance_id=one.instance_id, first=0, last=self._layers)
        one.pipeline = LivePipeline(
            pipeline_id=self._new_id(), epoch=0, stages=(stage,), head=0, rate=1.0, slots=self._slots
        )
        reason = f"{node} holds {one.layers} of {self._layers} layers for layer-wise prefill"
        return StartPipeline(pipeline=one.pipeline, reason=reason)

    def _known(self, node: str, instance_id: str) -> _LayerwiseNode | None:
        one = self._nodes.get(node)
        return one if one is not None and one.instance_id == instance_id else None

    def _end(self, node: str, reason: str) -> tuple[LayerwiseAction, ...]:
        one = self._nodes.pop(node, None)
        if one is None or one.pipeline is None:
            return ()
        return (ClosePipeline(pipeline_id=one.pipeline.pipeline_id, reason=reason),)
