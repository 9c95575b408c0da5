"""What is told of nodes that load a model, and what is to be done so that they serve meanwhile (pure)."""

from dataclasses import dataclass

from gateway.stage_cover import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Nodes that serve a whole model together, stage by stage. `epoch` grows when it is formed anew; `rate`
    is what it can serve, in whole nodes: 1 is a node that has the model and does nothing else."""

    number: int
    epoch: int
    stages: tuple[Stage, ...]
    rate: float

    def __repr__(self) -> str:
        stages = " ".join(f"{stage.node}[{stage.first},{stage.last})" for stage in self.stages)
        return f"Pipeline({self.number}.{self.epoch}: {stages}, {self.rate:.2f} nodes)"

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(stage.node for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A node loads the model in the block order of `group`: a sub-group of a cast, or one of its own for a
    node that loads from its own host memory. `speed` is of a node that computes faster or slower than one."""

    node: str
    group: int
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """The blocks, as bits, that are where the node computes. Maps only grow."""

    node: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The node is dead, or wanted elsewhere."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The pipeline of this number is being set up: forming it anew before it takes calls would delay it."""

    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """It takes calls."""

    pipeline: int


Event = Loading | Holds | Gone | Opening | Opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Begin to serve by a new pipeline."""

    pipeline: Pipeline
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform:
    """The pipeline of this number goes on with other stages: its requests stay with it, and what keys and
    values a stage lacks are computed again."""

    pipeline: Pipeline
    before: Pipeline
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The node holds the whole model and serves alone from now on: the mode switch of one node.

    It takes one in `sharers` of the unfinished requests of `pipeline`, and runs its stage for the others
    until the pipeline is dissolved.
    """

    node: str
    pipeline: int | None
    sharers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dissolve:
    """The pipeline ends: its unfinished requests go to whoever serves."""

    pipeline: Pipeline
    reason: str


Action = Form | Reform | Alone | Dissolve
