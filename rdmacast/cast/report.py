"""What a node did in a cast, and what went wrong meanwhile."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rdmacast.cast_spec import CastSpec
from rdmacast.errors import BlocksLost
from rdmacast.transport import Choice

_NAMED = 8  # blocks in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class CastFaults:
    """What went wrong, as counts of pulls; `lost` are names of nodes, and why each was lost.

    `damaged` blocks came but were not as they should be, `late` ones did not come in time, `failed` ones
    broke off; `replanned` ones came from another than the planned source.
    """

    damaged: int
    late: int
    failed: int
    replanned: int
    lost: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastReport:
    """One node's part, up to now or at its end.

    Times are seconds since its begin; `nbytes` are those of good blocks that were pulled, `choices` the
    transport of each peer that was pulled from, and why that one, by the peer's name; `slow` are nodes that
    the plan goes around.
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
    choices: Mapping[str, Choice]
    faults: CastFaults
    slow: tuple[str, ...] = ()


class CastTally:
    """Adds up what a report tells."""

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

    def came(self, peer: str, transport: str, nbytes: int, at_s: float, *, planned: bool) -> None:
        """A good block; `at_s` counts from the cast's begin."""
        self.by_peer[peer] += nbytes
        self.by_transport[transport] += nbytes
        self.replanned += not planned
        self.last_block_s = at_s
        if self.first_block_s is None:
            self.first_block_s = at_s


def lost_blocks(spec: CastSpec, blocks: Sequence[int], lost: Mapping[str, str]) -> BlocksLost:
    """That nobody gives these blocks any more; `lost` tells by name why nodes are gone."""
    named = ", ".join(map(str, blocks[:_NAMED])) + (", …" if len(blocks) > _NAMED else "")
    reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
    extents = [spec.extent(block) for block in blocks]
    return BlocksLost(
        f"nobody is left to give blocks {named} of {spec.region} ({reasons or 'no node was lost'})",
        tuple(blocks),
        tuple((offset, offset + nbytes) for offset, nbytes in extents),
    )
