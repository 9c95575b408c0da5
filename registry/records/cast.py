"""A cast: one image on its way from its holders to several nodes at once, by one transfer plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from registry.errors import InvalidRecord
from registry.node import Tier


class CastState(StrEnum):
    """Of a node's part in a cast; a node that comes back begins another one."""

    RUNNING = "running"  # blocks are missing, and somebody may still give them
    COMPLETE = "complete"  # all blocks are here and checked
    FAILED = "failed"  # `error` says why: blocks that nobody has, or a fault of this node
    CANCELLED = "cancelled"  # nobody wants the image on this node any more


TRANSITIONS: Mapping[CastState, frozenset[CastState]] = {
    CastState.RUNNING: frozenset({CastState.COMPLETE, CastState.FAILED, CastState.CANCELLED}),
    CastState.COMPLETE: frozenset(),
    CastState.FAILED: frozenset(),
    CastState.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CastMember:
    """A node of a cast. `address` is that of its region server, `tier` where a source holds the image, and
    `epoch` that of the cast by which it joined, or came back to it, at `joined_at` (Unix seconds; 0.0: with
    the cast's start)."""

    node: str
    host: str
    address: str
    tier: Tier = Tier.NONE
    epoch: int = 0
    joined_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRecord:
    """The plan of a cast, published by the controller before its first start is asked for.

    `sources` are indexes of `members`: those that hold the image, or read it from the store. Members from
    `planned` on joined later and have no part in the plan; each join raises `epoch` by one. `reason` is the
    planner's one line on why it chose this way. Members at the `edge` were known to be slow: the plan is for
    the others, from which these take what they have. With `in_turn` blocks come in the order of the plan's
    steps, one at a time. `link_bytes_s` is what the slowest of the plan's links was measured to carry, 0 if
    nobody knows. Times are Unix seconds.
    """

    cast_id: str
    image: str
    function: str
    version: int
    nbytes: int
    block_bytes: int
    planner: str
    reason: str
    members: tuple[CastMember, ...]
    sources: tuple[int, ...]
    planned: int
    started_at: float
    epoch: int = 0
    edge: tuple[int, ...] = ()
    in_turn: bool = False
    link_bytes_s: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.sources) <= self.planned <= len(self.members):
            raise InvalidRecord(
                f"cast {self.cast_id} has {len(self.members)} members, {self.planned} planned"
            )
        if not all(0 <= source < self.planned for source in self.sources):
            raise InvalidRecord(f"a source of cast {self.cast_id} is none of its members")
        if self.nbytes < 1 or self.block_bytes < 1:
            raise InvalidRecord(
                f"cast {self.cast_id} has {self.nbytes} bytes in blocks of {self.block_bytes}"
            )
        if len({member.node for member in self.members}) != len(self.members):
            raise InvalidRecord(f"a node is twice in cast {self.cast_id}")

    @property
    def targets(self) -> tuple[CastMember, ...]:
        """The members that are to get the image."""
        return tuple(one for index, one in enumerate(self.members) if index not in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastDetails:
    """What is told of a node's part besides, of which a summary needs nothing."""

    transports: Mapping[str, str] = field(default_factory=dict)
    pulled: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CastProgress:
    """A node's part in a cast, told by the node itself: at its begin, now and then, and at its end. What was
    told of an earlier part (by `epoch`), or earlier (by `updated_at`, Unix seconds of the node's clock), does
    not replace it.

    `epoch` is that of the cast by which the part began. `held` of `blocks` are there. `received` are bytes of
    good blocks by transport, which came within `span_s`, from the first one's arrival to the last one's;
    `pulled` are these bytes by peer, and `transports` says of each by which transport, and why; `faults`
    counts pulls that went wrong, by kind.
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
        """The same without its details."""
        return self.with_details(CastDetails())

    def with_details(self, details: CastDetails) -> "CastProgress":
        return replace(self, transports=details.transports, pulled=details.pulled, error=details.error)

    def follows(self, earlier: "CastProgress") -> bool:
        """Whether it is told after `earlier`, of the same node."""
        return (self.epoch, self.updated_at) >= (earlier.epoch, earlier.updated_at)

    @property
    def is_final(self) -> bool:
        """Whether it is the node's last word."""
        return not TRANSITIONS[self.state]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastStatus:
    """A cast and what its nodes told of it, by node."""

    record: CastRecord
    progress: tuple[CastProgress, ...] = ()


def in_order(records: Iterable[CastRecord]) -> list[CastRecord]:
    """The latest first."""
    return sorted(records, key=lambda record: (-record.started_at, record.cast_id))
