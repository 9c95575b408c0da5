"""A cast: the multicast of one image from its sources to several nodes, by one transfer plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rdmacast.cast.record import CastPlan


class CastState(StrEnum):
    """The state of a node's part in a cast; a node that rejoins starts a new part."""

    RUNNING = "running"  # blocks are missing and still available
    COMPLETE = "complete"  # all blocks are received and verified
    FAILED = "failed"  # `error` has the reason: blocks without a holder, or a fault of this node
    CANCELLED = "cancelled"  # the image is no longer needed on this node


TRANSITIONS: Mapping[CastState, frozenset[CastState]] = {
    CastState.RUNNING: frozenset({CastState.COMPLETE, CastState.FAILED, CastState.CANCELLED}),
    CastState.COMPLETE: frozenset(),
    CastState.FAILED: frozenset(),
    CastState.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRecord(CastPlan):
    """A cast, published by the controller before the first start that uses it.

    `reason` is one line by the planner. `started_at` is in Unix seconds.
    """

    function: str
    version: int
    reason: str
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CastDetails:
    """Details of a node's progress that a summary does not need."""

    transports: Mapping[str, str] = field(default_factory=dict)
    pulled: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CastProgress:
    """The progress of a node's part in a cast, reported by the node at its start, regularly, and at its end.

    Reports of an earlier part (by `epoch`, that of the cast when the part started), or older ones (by
    `updated_at`, Unix seconds of the node's clock), do not replace newer ones.

    `held` of `blocks` have arrived. `received` are bytes of verified blocks by transport, which arrived
    within `span_s`, from the first block to the last; `pulled` are these bytes by peer; `transports` has the
    transport of each peer and the reason for it; `faults` counts failed pulls by kind.
    """

    cast_id: str
    node: str
    state: CastState
    blocks: int
    held: int
    seconds: float
    updated_at: float
    received: Mapping[str, int] = field(default_factory=dict)
    transports: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    epoch: int = 0
    span_s: float = 0.0
    pulled: Mapping[str, int] = field(default_factory=dict)

    @property
    def details(self) -> CastDetails:
        return CastDetails(transports=self.transports, pulled=self.pulled, error=self.error)

    @property
    def brief(self) -> "CastProgress":
        """The progress without its details."""
        return self.with_details(CastDetails())

    def with_details(self, details: CastDetails) -> "CastProgress":
        """Return the progress with these details."""
        return replace(self, transports=details.transports, pulled=details.pulled, error=details.error)

    def follows(self, earlier: "CastProgress") -> bool:
        """Return whether this report is newer than `earlier`, of the same node."""
        return (self.epoch, self.updated_at) >= (earlier.epoch, earlier.updated_at)

    @property
    def is_final(self) -> bool:
        """Whether this is the node's final report."""
        return not TRANSITIONS[self.state]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastStatus:
    """A cast and the progress of its nodes, in order of node id."""

    record: CastRecord
    progress: tuple[CastProgress, ...] = ()


def latest_first(records: Iterable[CastRecord]) -> list[CastRecord]:
    """Return the records, the latest first."""
    return sorted(records, key=lambda record: (-record.started_at, record.cast_id))
