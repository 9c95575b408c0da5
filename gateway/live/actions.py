"""Events of nodes that load a model, and the pipeline actions that follow from them (pure)."""

from dataclasses import dataclass

from gateway.live.stage_cover import StageRange


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """Nodes that serve a whole model together, stage by stage.

    `epoch` grows with each reconfiguration. `rate` is its throughput in whole nodes: 1 is a ready node that
    does nothing else.
    """

    number: int
    epoch: int
    stages: tuple[StageRange, ...]
    rate: float

    def __repr__(self) -> str:
        stages = " ".join(f"{stage.node}[{stage.first},{stage.last})" for stage in self.stages)
        return f"Pipeline({self.number}.{self.epoch}: {stages}, {self.rate:.2f} nodes)"

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(stage.node for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted:
    """A node starts to load the model in the block order of `group`.

    That is a sub-group of a cast, or the node's own when it loads from host memory. `speed` is relative to a
    usual node.
    """

    node: str
    group: int
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersReported:
    """The bitfield of blocks in the node's device memory. It only grows."""

    node: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """The node failed, or is used otherwise."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOpening:
    """The pipeline of this number is being set up, and must not be reconfigured before it takes calls."""

    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineServing:
    """The pipeline of this number takes calls."""

    pipeline: int


PipelineEvent = LoadStarted | LayersReported | NodeLost | PipelineOpening | PipelineServing


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create a pipeline."""

    pipeline: PlannedPipeline
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigure:
    """Reconfigure a pipeline with other stages.

    Its requests stay with it, and the KV cache that a stage lacks is recomputed.
    """

    pipeline: PlannedPipeline
    before: PlannedPipeline
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """Promote a node that holds the whole model: it serves alone from now on.

    It takes one in `sharers` of the unfinished requests of `pipeline`, and runs its stage for the others
    until the pipeline is torn down.
    """

    node: str
    pipeline: int | None
    sharers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Teardown:
    """Tear a pipeline down: its unfinished requests are routed again."""

    pipeline: PlannedPipeline
    reason: str


PipelineAction = Create | Reconfigure | Promote | Teardown
