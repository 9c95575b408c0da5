"""The pipelines of one function version's loading instances (pure).

It maps the assembler's nodes to instances and its actions to the records that are published. A member holds
all layers once its instance is ready.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.live.actions import (
    Create,
    LayersReported,
    LoadStarted,
    NodeLost,
    PipelineAction,
    PipelineEvent,
    PipelineOpening,
    PipelineServing,
    PlannedPipeline,
    Promote,
    Reconfigure,
    Teardown,
)
from gateway.live.assembler import PipelineAssembler
from gateway.live.model_layers import ModelLayers
from registry.records.live import LivePipeline, LiveStage, LiveSwitch

# Slots of a pipeline, relative to those of its nodes alone: it is short-lived, and its calls move on.
_SLOTS_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPipeline:
    """Open the pipeline, after its earlier epoch is closed."""

    pipeline: LivePipeline
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteMember:
    """Publish that a member serves alone from now on."""

    pipeline_id: str
    switch: LiveSwitch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePipeline:
    """Close the pipeline; its unfinished calls are routed again."""

    pipeline_id: str
    reason: str


LiveGroupAction = StartPipeline | PromoteMember | ClosePipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """Facts of a model: with a tied head (`head_first`), the first stage runs it.

    An instance runs `max_concurrency` calls at once.
    """

    head_first: bool
    max_concurrency: int


class LiveGroup:
    """The loading instances of one version and their pipelines: each method returns actions in order."""

    def __init__(self, layers: ModelLayers, settings: PipelineModel, new_id: Callable[[], str]) -> None:
        self._layers = layers
        self._settings = settings
        self._new_id = new_id
        self._pipelines = PipelineAssembler(layers)
        self._instances: dict[str, str] = {}  # by node
        self._records: dict[int, LivePipeline] = {}  # by number

    def __repr__(self) -> str:
        return f"<LiveGroup {self._instances} {self._pipelines!r}>"

    @property
    def is_over(self) -> bool:
        return not self._instances

    def add(self, node: str, instance_id: str, group: int, place: int = 0) -> tuple[LiveGroupAction, ...]:
        """Add an instance that starts to load; its place in the sub-group does not matter."""
        actions = self._remove(node, "it restarted") if node in self._instances else ()
        self._instances[node] = instance_id
        return (*actions, *self._apply([LoadStarted(node=node, group=group)]))

    def on_layers(self, node: str, instance_id: str, layers: int) -> tuple[LiveGroupAction, ...]:
        """Record the bitfield of layers that can run there; all of them count only once it is ready."""
        if (
            self._instances.get(node) != instance_id
            or layers & self._layers.all_blocks == self._layers.all_blocks
        ):
            return ()
        return self._apply([LayersReported(node=node, blocks=layers)])

    def on_ready(self, node: str, instance_id: str) -> tuple[LiveGroupAction, ...]:
        if self._instances.get(node) != instance_id:
            return ()
        actions = self._apply([LayersReported(node=node, blocks=self._layers.all_blocks)])
        if all(node not in pipeline.nodes for pipeline in self._pipelines.pipelines):
            self._discard(node)
        self._tidy()
        return actions

    def remove(self, node: str, instance_id: str, reason: str) -> tuple[LiveGroupAction, ...]:
        """Remove an instance that failed, was stopped or cannot be a stage."""
        return self._remove(node, reason) if self._instances.get(node) == instance_id else ()

    def on_lost(self, pipeline_id: str, epoch: int, node: str, reason: str) -> tuple[LiveGroupAction, ...]:
        """Remove the member that made the pipeline fail."""
        record = [(one.pipeline_id, one.epoch) for one in self._records.values()]
        return self._remove(node, reason) if (pipeline_id, epoch) in record else ()

    def on_opened(self, pipeline_id: str, epoch: int) -> None:
        """Record that the pipeline takes calls."""
        for number, record in self._records.items():
            if (record.pipeline_id, record.epoch) == (pipeline_id, epoch):
                self._pipelines.apply([PipelineServing(pipeline=number)])

    # --- inside

    def _remove(self, node: str, reason: str) -> tuple[LiveGroupAction, ...]:
        self._instances.pop(node, None)
        actions = self._apply([NodeLost(node=node, reason=reason)])
        self._tidy()
        return actions

    def _discard(self, node: str) -> None:
        """Remove a promoted node that no pipeline needs."""
        self._instances.pop(node, None)
        self._pipelines.apply([NodeLost(node=node, reason="it is promoted")])

    def _tidy(self) -> None:
        busy = {node for pipeline in self._pipelines.pipelines for node in pipeline.nodes}
        for node in [node for node in self._pipelines.whole if node not in busy]:
            self._discard(node)

    def _apply(self, events: Iterable[PipelineEvent]) -> tuple[LiveGroupAction, ...]:
        return tuple(
            translated for action in self._pipelines.apply(events) for translated in self._translate(action)
        )

    def _translate(self, action: PipelineAction) -> tuple[LiveGroupAction, ...]:
        match action:
            case Create(pipeline=pipeline, reason=reason) | Reconfigure(pipeline=pipeline, reason=reason):
                return (StartPipeline(pipeline=self._record(pipeline), reason=reason),)
            case Promote(node=node, pipeline=number, sharers=sharers, reason=reason):
                if number is None or number not in self._records:
                    return ()
                switch = LiveSwitch(instance_id=self._instances[node], sharers=sharers)
                pipeline_id = self._records[number].pipeline_id
                return (PromoteMember(pipeline_id=pipeline_id, switch=switch, reason=reason),)
            case Teardown(pipeline=pipeline, reason=reason):
                pipeline_id = self._records.pop(pipeline.number).pipeline_id
                return (ClosePipeline(pipeline_id=pipeline_id, reason=reason),)

    def _record(self, pipeline: PlannedPipeline) -> LivePipeline:
        """Return the record of a pipeline that is to be opened."""
        self._pipelines.apply([PipelineOpening(pipeline=pipeline.number)])
        before = self._records.get(pipeline.number)
        record = LivePipeline(
            pipeline_id=self._new_id() if before is None else before.pipeline_id,
            epoch=pipeline.epoch,
            stages=tuple(
                LiveStage(
                    node=one.node, instance_id=self._instances[one.node], first=one.first, last=one.last
                )
                for one in pipeline.stages
            ),
            head=0 if self._settings.head_first else len(pipeline.stages) - 1,
            rate=pipeline.rate,
            slots=_SLOTS_FACTOR * self._settings.max_concurrency * len(pipeline.stages),
        )
        self._records[pipeline.number] = record
        return record
