"""What a node must know to take part in a cast (pure)."""

from dataclasses import dataclass

from rdmacast.have_map import MAX_BLOCKS
from rdmacast.plan import CastShape
from rdmacast.planners.catalog import PLANNERS
from rdmacast.planners.own_part import Order, own_part
from rdmacast.transport import PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node of a cast and where its regions are served."""

    name: str
    address: PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """One cast of `region`, the same for all its nodes: numbers of nodes are indexes of `members`.

    `sources` hold everything. Each node works out its own part from the planner's name, unless it is
    given one (`Cast(order=…)`). `epoch` is above that of any earlier life or plan of the node.
    """

    cast: str
    region: str
    nbytes: int
    block_bytes: int
    members: tuple[Member, ...]
    sources: tuple[int, ...]
    planner: str = "binomial"
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.nbytes <= 0 or self.block_bytes <= 0:
            raise ValueError("a cast has more than 0 bytes, in blocks of more than 0")
        if self.blocks > MAX_BLOCKS:
            raise ValueError(f"a cast has at most {MAX_BLOCKS} blocks, not {self.blocks}")
        if self.planner not in PLANNERS:
            raise ValueError(f"there is no planner {self.planner!r}; use one of {', '.join(PLANNERS)}")
        if len({member.name for member in self.members}) != len(self.members):
            raise ValueError("the nodes of a cast must have different names")
        self.shape  # noqa: B018  # its own checks

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    @property
    def shape(self) -> CastShape:
        return CastShape(nodes=len(self.members), sources=self.sources, blocks=self.blocks)

    def node(self, name: str) -> int:
        """Raises ValueError if no member has that name."""
        for index, member in enumerate(self.members):
            if member.name == name:
                return index
        raise ValueError(f"no node {name!r} is in cast {self.cast}")

    def extent(self, block: int) -> tuple[int, int]:
        """(offset, size) of a block in the region."""
        offset = block * self.block_bytes
        return offset, min(self.block_bytes, self.nbytes - offset)

    def order(self, node: int) -> Order:
        """The node's own part of the plan."""
        return own_part(self.planner, self.shape, node)
