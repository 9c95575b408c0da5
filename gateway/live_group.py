"""One function version's starts that are live, and the pipelines that they form: pure decisions.

It knows members by their instances, hears what the starts tell, and answers what to do in terms of the
records that gateways and nodes are told. A member counts as whole once its instance is ready.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.model_layers import ModelLayers
from gateway.pipeline_actions import (
    Action,
    Alone,
    Dissolve,
    Event,
    Form,
    Gone,
    Holds,
    Loading,
    Opened,
    Opening,
    Pipeline,
    Reform,
)
from gateway.pipelines import Pipelines
from registry.live import LivePipeline, LiveStage, LiveSwitch

# Times the calls that its nodes take alone: a pipeline is not there for long, and then they go elsewhere.
_CROWD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Have an earlier epoch of the pipeline left, then this one opened."""

    pipeline: LivePipeline
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A member serves alone from now on."""

    pipeline_id: str
    switch: LiveSwitch
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The pipeline takes nothing more; what is unfinished there goes on elsewhere."""

    pipeline_id: str
    reason: str


Todo = Open | Switch | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """`head_first`: the head is tied to the embedding, so it is on the first stage. An instance takes
    `max_concurrency` calls at once."""

    head_first: bool
    max_concurrency: int


class LiveGroup:
    """Each method takes what happened and answers what is to be done, in order."""

    def __init__(
        self,
        layers: ModelLayers,
        settings: GroupSettings,
        new_id: Callable[[], str],
        pipelines: Pipelines | None = None,
    ) -> None:
        self._layers = layers
        self._settings = settings
        self._new_id = new_id
        self._pipelines = pipelines or Pipelines(layers)
        self._instances: dict[str, str] = {}  # node -> its instance
        self._ids: dict[int, str] = {}  # number of a pipeline -> its id
        self._shown: dict[int, LivePipeline] = {}

    def __repr__(self) -> str:
        return f"<LiveGroup {self._instances} {self._pipelines!r}>"

    @property
    def is_over(self) -> bool:
        return not self._instances

    def begin(self, node: str, instance_id: str, group: int) -> tuple[Todo, ...]:
        """An instance begins to load."""
        todos = self._gone(node, "it begins anew") if node in self._instances else ()
        self._instances[node] = instance_id
        return (*todos, *self._hear([Loading(node=node, group=group)]))

    def holds(self, node: str, instance_id: str, layers: int) -> tuple[Todo, ...]:
        """The layers, as bits, can run there. All of them is not told before the instance is ready."""
        if (
            self._instances.get(node) != instance_id
            or layers & self._layers.all_blocks == self._layers.all_blocks
        ):
            return ()
        return self._hear([Holds(node=node, blocks=layers)])

    def ready(self, node: str, instance_id: str) -> tuple[Todo, ...]:
        if self._instances.get(node) != instance_id:
            return ()
        todos = self._hear([Holds(node=node, blocks=self._layers.all_blocks)])
        if all(node not in pipeline.nodes for pipeline in self._pipelines.pipelines):
            self._forget(node)
        self._tidy()
        return todos

    def gone(self, node: str, instance_id: str, reason: str) -> tuple[Todo, ...]:
        """The instance is gone, or cannot be a stage any more."""
        return self._gone(node, reason) if self._instances.get(node) == instance_id else ()

    def lost(self, pipeline_id: str, epoch: int, node: str, reason: str) -> tuple[Todo, ...]:
        """A pipeline ended by itself, since that member failed it."""
        shown = [(one.pipeline_id, one.epoch) for one in self._shown.values()]
        return self._gone(node, reason) if (pipeline_id, epoch) in shown else ()

    def opened(self, pipeline_id: str, epoch: int) -> None:
        """It takes calls."""
        for number, shown in self._shown.items():
            if (shown.pipeline_id, shown.epoch) == (pipeline_id, epoch):
                self._pipelines.hear([Opened(pipeline=number)])

    # --- inside

    def _gone(self, node: str, reason: str) -> tuple[Todo, ...]:
        self._instances.pop(node, None)
        todos = self._hear([Gone(node=node, reason=reason)])
        self._tidy()
        return todos

    def _forget(self, node: str) -> None:
        """It serves alone, and no pipeline needs it."""
        self._instances.pop(node, None)
        self._pipelines.hear([Gone(node=node, reason="it serves alone")])

    def _tidy(self) -> None:
        busy = {node for pipeline in self._pipelines.pipelines for node in pipeline.nodes}
        for node in [node for node in self._pipelines.whole if node not in busy]:
            self._forget(node)

    def _hear(self, events: Iterable[Event]) -> tuple[Todo, ...]:
        return tuple(todo for action in self._pipelines.hear(events) for todo in self._todo(action))

    def _todo(self, action: Action) -> tuple[Todo, ...]:
        match action:
            case Form(pipeline=pipeline, reason=reason) | Reform(pipeline=pipeline, reason=reason):
                return (Open(pipeline=self._show(pipeline), reason=reason),)
            case Alone(node=node, pipeline=number, sharers=sharers, reason=reason):
                if number is None or number not in self._ids:
                    return ()
                switch = LiveSwitch(instance_id=self._instances[node], sharers=sharers)
                return (Switch(pipeline_id=self._ids[number], switch=switch, reason=reason),)
            case Dissolve(pipeline=pipeline, reason=reason):
                self._shown.pop(pipeline.number, None)
                return (Close(pipeline_id=self._ids.pop(pipeline.number), reason=reason),)

    def _show(self, pipeline: Pipeline) -> LivePipeline:
        """As it is told of, for it to be opened."""
        self._pipelines.hear([Opening(pipeline=pipeline.number)])
        pipeline_id = self._ids.setdefault(pipeline.number, "") or self._new_id()
        self._ids[pipeline.number] = pipeline_id
        shown = LivePipeline(
            pipeline_id=pipeline_id,
            epoch=pipeline.epoch,
            stages=tuple(
                LiveStage(
                    node=one.node, instance_id=self._instances[one.node], first=one.first, last=one.last
                )
                for one in pipeline.stages
            ),
            head=0 if self._settings.head_first else len(pipeline.stages) - 1,
            rate=pipeline.rate,
            slots=_CROWD * self._settings.max_concurrency * len(pipeline.stages),
        )
        self._shown[pipeline.number] = shown
        return shown
