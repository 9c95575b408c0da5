"""The report of a node's part in a cast, and of its faults."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rdmacast.cast.spec import CastSpec
from rdmacast.errors import BlocksLost
from rdmacast.transport import TransportChoice

_NAMED = 8  # blocks in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class CastFaults:
    """Faults as counts of pulls; `lost` has nodes by name, and why each was lost.

    `damaged` blocks failed their checks, `late` ones timed out, `failed` ones were aborted; `replanned`
    ones came from another than the planned source.
    """

    damaged: int
    late: int
    failed: int
    replanned: int
    lost: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastReport:
    """One node's part, up to now or at its end.

    Times are seconds since its start; `nbytes` are those of good blocks that were pulled, `choices` the
    transport of each peer that was pulled from, and why, by the peer's name; `slow` are nodes that the plan
    avoids.
    """

    cast: str
    node: str
    state: str
    blocks: int
    held: int  # blocks
    nbytes: int
    seconds: float
    first_block_s: float | None
    last_block_s: float | None
    bytes_by_peer: Mapping[str, int]
    bytes_by_transport: Mapping[str, int]
    choices: Mapping[str, TransportChoice]
    faults: CastFaults
    slow: tuple[str, ...] = ()


class CastTally:
    """The counters of a report."""

    def __init__(self) -> None:
        self.damaged = 0
        self.late = 0
        self.failed = 0
        self.replanned = 0
        self.lost: dict[str, str] = {}
        self.by_peer: Counter[str] = Counter()
        self.by_transport: Counter[str] = Counter()
        self.first_block_s: float | None = None
        self.last_block_s: float | None = None

    def __repr__(self) -> str:
        return f"CastTally({sum(self.by_peer.values())} bytes, {self.faults(self.lost)})"

    def faults(self, lost: Mapping[str, str]) -> CastFaults:
        return CastFaults(
            damaged=self.damaged,
            late=self.late,
            failed=self.failed,
            replanned=self.replanned,
            lost=MappingProxyType(dict(lost)),
        )

    def add_block(self, peer: str, transport: str, nbytes: int, at_s: float, *, planned: bool) -> None:
        """Count a good block; `at_s` is measured from the start of the cast."""
        self.by_peer[peer] += nbytes
        self.by_transport[transport] += nbytes
        self.replanned += not planned
        self.last_block_s = at_s
        if self.first_block_s is None:
            self.first_block_s = at_s


def lost_blocks(spec: CastSpec, blocks: Sequence[int], lost: Mapping[str, str]) -> BlocksLost:
    """Return the error for blocks that no node can serve; `lost` has reasons by the names of lost nodes."""
    named = ", ".join(map(str, blocks[:_NAMED])) + (", …" if len(blocks) > _NAMED else "")
    reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
    extents = [spec.extent(block) for block in blocks]
    return BlocksLost(
        f"no node is left to serve blocks {named} of {spec.plan.image} ({reasons or 'no node was lost'})",
        tuple(blocks),
        tuple((offset, offset + nbytes) for offset, nbytes in extents),
    )
