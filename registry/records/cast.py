"""A cast: the multicast of one image from its sources to several nodes, by one transfer plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from registry.errors import InvalidRecord
from registry.records.node import Tier


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
class CastMemberRecord:
    """A node of a cast, with the `address` of its region server.

    `tier` is where a source holds the image. `epoch` is the epoch of the cast at which the node joined or
    rejoined, at `joined_at` (Unix seconds; 0.0: at the start of the cast).
    """

    node: str
    host: str
    address: str
    tier: Tier = Tier.NONE
    epoch: int = 0
    joined_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRecord:
    """The plan of a cast, published by the controller before the first start that uses it.

    `sources` are indexes of `members`: those that hold the image or read it from the store. Members from
    `planned` on joined later and have no part in the plan; each join increments `epoch`. `reason` is one line
    by the planner. Members at the `edge` have slow links: the plan covers the others, from which these pull.
    With `in_slots` blocks are sent in the order of the plan's steps, one at a time. `link_bytes_s` is the
    measured rate of the slowest link of the plan, 0 if unknown. Times are Unix seconds.
    """

    cast_id: str
    image: str
    function: str
    version: int
    nbytes: int
    block_bytes: int
    planner: str
    reason: str
    members: tuple[CastMemberRecord, ...]
    sources: tuple[int, ...]
    planned: int
    started_at: float
    epoch: int = 0
    edge: tuple[int, ...] = ()
    in_slots: bool = False
    link_bytes_s: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.sources) <= self.planned <= len(self.members):
            raise InvalidRecord(
                f"cast {self.cast_id} has {len(self.members)} members, {self.planned} planned"
            )
        if not all(0 <= source < self.planned for source in self.sources):
            raise InvalidRecord(f"cast {self.cast_id} has a source that is not a planned member")
        if self.nbytes < 1 or self.block_bytes < 1:
            raise InvalidRecord(
                f"cast {self.cast_id} has {self.nbytes} bytes in blocks of {self.block_bytes}"
            )
        if len({member.node for member in self.members}) != len(self.members):
            raise InvalidRecord(f"cast {self.cast_id} has a node twice")

    @property
    def targets(self) -> tuple[CastMemberRecord, ...]:
        """The members that receive the image."""
        return tuple(one for index, one in enumerate(self.members) if index not in self.sources)


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
