"""How a function serves while its model arrives: the setting, and what the controller tells of it.

A *live pipeline* is a chain of stages on nodes that are loading; calls go to the node with the head. All of
a function version's pipelines stand in one record, so that a change of several is one change.
"""

from dataclasses import dataclass
from enum import StrEnum


class Live(StrEnum):
    """A function's setting `live`. The way that is decided on is any but AUTO."""

    PIPELINE = "pipeline"  # nodes that load form pipelines
    ZIGZAG = "zigzag"  # an overloaded instance shares its requests with a node that loads
    AUTO = "auto"  # the better of the two, where waiting for a whole instance would miss the TTFT target
    OFF = "off"  # nobody serves before it holds everything


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStage:
    """A member: `instance_id`, on `node`, runs the layers `[first, last)`."""

    node: str
    instance_id: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSwitch:
    """A member that serves alone by now. On hearing of it each gateway moves one in `sharers` of its
    unfinished calls there."""

    instance_id: str
    sharers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePipeline:
    """A pipeline that takes calls. `head` is the index of the stage that they go to, `rate` what it serves,
    in whole nodes, and `slots` how many calls it takes at once.

    With the way ZIGZAG it is a pair: the first stage's node is loading, and helps the instance of the second
    one, the source, which is ready, and takes no calls but by the pair.
    """

    pipeline_id: str
    epoch: int
    stages: tuple[LiveStage, ...]
    head: int
    rate: float
    slots: int
    switched: tuple[LiveSwitch, ...] = ()
    way: Live = Live.PIPELINE

    @property
    def source(self) -> LiveStage | None:
        """Of a pair."""
        return self.stages[-1] if self.way is Live.ZIGZAG else None

    @property
    def name(self) -> str:
        return f"{self.pipeline_id}.{self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRecord:
    """A function version's live serving, as its controller says. One of a later controller, or of the same
    with a higher `serial`, replaces it. `way` and `reason` are the last decision whether to go live; `at` is
    when that was made, in Unix seconds."""

    function: str
    version: int
    controller_epoch: int
    serial: int
    way: Live
    reason: str
    at: float
    pipelines: tuple[LivePipeline, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        """Later records have greater ones."""
        return self.controller_epoch, self.serial
