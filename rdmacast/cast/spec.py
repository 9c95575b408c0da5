"""What a node must know to take part in a cast (pure)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rdmacast.due import Due, mark_of
from rdmacast.have_map import MAX_BLOCKS
from rdmacast.plan import CastShape
from rdmacast.planners.catalog import PLANNERS
from rdmacast.planners.own_part import Order
from rdmacast.planners.steps import steps_of
from rdmacast.pull_report import MAX_CAST_BYTES, MOST_SLOW
from rdmacast.stragglers import order_around
from rdmacast.transport import PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node of a cast and where its regions are served."""

    name: str
    address: PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """One cast of `region`, the same for all its nodes: numbers of nodes are indexes of `members`.

    `sources` hold everything. Each node works out its own part from the planner's name. Members from
    `planned` on joined later and have no part in the plan: they take blocks from whoever has them. Those of
    the `edge` are slow, and get what the others have. With `in_turn` blocks leave and come in
    the order of the plan's steps, one at a time: for blocks that take long beside what asking for one takes.
    `link_bytes_s` is what the slowest of the plan's links was measured to carry, 0 if nobody knows.
    `borders` are those of the plan (see CastShape), of which all members know the same.
    `epoch` is above that of any earlier life of the node.
    """

    cast: str
    region: str
    nbytes: int
    block_bytes: int
    members: tuple[Member, ...]
    sources: tuple[int, ...]
    planned: int | None = None
    edge: tuple[int, ...] = ()
    planner: str = "binomial"
    borders: tuple[int, ...] = ()
    in_turn: bool = False
    link_bytes_s: int = 0
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
        if not 1 <= len(self.cast) <= MAX_CAST_BYTES or not (self.cast.isascii() and self.cast.isprintable()):
            raise ValueError(f"a cast is named by 1 to {MAX_CAST_BYTES} printable ASCII characters")
        if not 1 <= self._planned <= len(self.members):
            raise ValueError(f"{self.planned} of {len(self.members)} members cannot be planned for")
        if len(self.edge) > MOST_SLOW or not set(self.edge) <= set(range(len(self.members))):
            raise ValueError("nodes at the edge of a cast are up to 256 of its members")
        self.shape  # noqa: B018  # its own checks

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    @property
    def block_s(self) -> float:
        """What a block should take over a link; 0 if nobody knows."""
        return self.block_bytes / self.link_bytes_s if self.link_bytes_s > 0 else 0.0

    @property
    def shape(self) -> CastShape:
        """Of the plan."""
        return CastShape(nodes=self._planned, sources=self.sources, blocks=self.blocks, borders=self.borders)

    @property
    def _planned(self) -> int:
        return len(self.members) if self.planned is None else self.planned

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

    def dues(self, node: int) -> Mapping[int, Due]:
        """When each block is due at the node, if they come in turn."""
        if not self.in_turn or self.edge or node >= self._planned:
            return {}
        mark = mark_of(self.cast)
        steps = steps_of(self.planner, self.shape, node)
        return {block: Due(mark=mark, step=step, after=after) for block, (step, after) in steps.items()}

    def order(self, node: int, slow: Collection[int] | None = None) -> Order | None:
        """The node's own part of the plan around the slow nodes (those of the edge, unless others are given);
        None if there is no such plan."""
        if node >= self._planned:
            return ()
        around = [one for one in (self.edge if slow is None else slow) if one < self._planned]
        return order_around(self.planner, self.shape, around, node)
