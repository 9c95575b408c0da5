"""Live serving of a function while its model is loading: the setting, and the controller's record.

A *live pipeline* is a chain of stages on nodes that are loading; calls go to the node of its last stage. One
record has all pipelines of a function version, so that a change of several is atomic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class LiveMode(StrEnum):
    """The setting `live` of a function; a decision is any mode except AUTO."""

    PIPELINE = "pipeline"  # loading nodes form pipelines
    ZIGZAG = "zigzag"  # an overloaded instance shares its requests with a loading node
    AUTO = "auto"  # the better of the two, where waiting for a whole instance would miss the TTFT target
    OFF = "off"  # only complete instances serve


class InstanceRole(StrEnum):
    """What an instance of a disaggregated function does for new calls; without a role it does both."""

    PREFILL = "prefill"  # runs prompts, and hands calls off after their first token
    DECODE = "decode"  # continues calls that were handed off


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStage:
    """A stage: `instance_id`, on `node`, runs the layers `[first, last)`."""

    node: str
    instance_id: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSwitch:
    """A stage that now serves alone; each gateway moves one in `sharers` of its unfinished calls to it."""

    instance_id: str
    sharers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePipeline:
    """A pipeline that takes calls.

    `head` is the index of the stage that calls are sent to, `rate` the throughput in whole nodes, and `slots`
    the number of concurrent calls.

    With `way` ZIGZAG it is a pair for layer-wise prefill: the node of the first stage is loading, and helps
    the ready instance of the second stage, the source, which takes calls through the pair only. A pipeline of
    one stage is a node that loads alone, a pair with itself.
    """

    pipeline_id: str
    epoch: int
    stages: tuple[LiveStage, ...]
    head: int
    rate: float
    slots: int
    switched: tuple[LiveSwitch, ...] = ()
    way: LiveMode = LiveMode.PIPELINE

    @property
    def source(self) -> LiveStage | None:
        """The ready instance of a ZigZag pair, None for other pipelines."""
        return self.stages[-1] if self.way is LiveMode.ZIGZAG else None

    @property
    def is_alone(self) -> bool:
        """Whether it is a pair of one loading node with itself."""
        return len(self.stages) == 1

    @property
    def is_pair(self) -> bool:
        """Whether it is a pair for layer-wise prefill, in which one instance replies alone."""
        return self.is_alone or self.way is LiveMode.ZIGZAG

    @property
    def name(self) -> str:
        return f"{self.pipeline_id}.{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRecord:
    """The live serving of a function version, as its controller decided.

    A record of a later controller, or of the same one with a higher `serial`, replaces it. `way` and `reason`
    are the last decision on the mode, made at `at` (Unix seconds). `roles` are those of instances, by id: a
    change loads nothing, and calls that run stay where they are.
    """

    function: str
    version: int
    controller_epoch: int
    serial: int
    way: LiveMode
    reason: str
    at: float
    pipelines: tuple[LivePipeline, ...] = ()
    roles: Mapping[str, InstanceRole] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """The sort key: later records have greater ones."""
        return self.controller_epoch, self.serial
