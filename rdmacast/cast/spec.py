"""The description of a cast that its nodes share (pure)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rdmacast.bitfield import MAX_BLOCKS
from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.own_part import Order
from rdmacast.plan.planners.slots import slots_of
from rdmacast.plan_slot import PlanSlot, plan_mark
from rdmacast.protocol.pull_report import MAX_CAST_BYTES, MAX_SLOW
from rdmacast.stragglers.slow_nodes import order_around
from rdmacast.transport import PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class CastMember:
    """A node of a cast, and the address of its region server."""

    name: str
    address: PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """One cast of `region`, the same for all its nodes: numbers of nodes are indexes of `members`.

    `sources` hold everything. Each node computes its own part from the planner's name. Members from
    `planned` on joined later and have no part in the plan: they take blocks from any holder. Nodes of the
    `edge` are slow, and get what the others have. With `in_slots` blocks leave and arrive in the order of
    the plan's steps, one at a time: for blocks that take long compared to a request. `link_bytes_s` is the
    measured rate of the slowest of the plan's links, 0 if unknown. `borders` are those of the plan (see
    CastShape), equal at all members. `epoch` is above that of any earlier life of the node.
    """

    cast: str
    region: str
    nbytes: int
    block_bytes: int
    members: tuple[CastMember, ...]
    sources: tuple[int, ...]
    planned: int | None = None
    edge: tuple[int, ...] = ()
    planner: str = "binomial"
    borders: tuple[int, ...] = ()
    in_slots: bool = False
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
        if len(self.edge) > MAX_SLOW or not set(self.edge) <= set(range(len(self.members))):
            raise ValueError("nodes at the edge of a cast are up to 256 of its members")
        self.shape  # noqa: B018  # its own checks

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    @property
    def block_s(self) -> float:
        """The seconds that a block should take over a link; 0 if unknown."""
        return self.block_bytes / self.link_bytes_s if self.link_bytes_s > 0 else 0.0

    @property
    def shape(self) -> CastShape:
        """Of the plan."""
        return CastShape(nodes=self._planned, sources=self.sources, blocks=self.blocks, borders=self.borders)

    @property
    def _planned(self) -> int:
        return len(self.members) if self.planned is None else self.planned

    def node(self, name: str) -> int:
        """Return the number of a member. Raises ValueError if none has that name."""
        for index, member in enumerate(self.members):
            if member.name == name:
                return index
        raise ValueError(f"no node {name!r} is in cast {self.cast}")

    def extent(self, block: int) -> tuple[int, int]:
        """Return (offset, size) of a block in the region."""
        offset = block * self.block_bytes
        return offset, min(self.block_bytes, self.nbytes - offset)

    def slots(self, node: int) -> Mapping[int, PlanSlot]:
        """Return each block's slot at the node, if the plan has slots."""
        if not self.in_slots or self.edge or node >= self._planned:
            return {}
        mark = plan_mark(self.cast)
        steps = slots_of(self.planner, self.shape, node)
        return {block: PlanSlot(mark=mark, step=step, after=after) for block, (step, after) in steps.items()}

    def order(self, node: int, slow: Collection[int] | None = None) -> Order | None:
        """Return the node's own part of the plan around the slow nodes; None if there is no such plan.

        The slow nodes are those of the edge unless others are given.
        """
        if node >= self._planned:
            return ()
        around = [one for one in (self.edge if slow is None else slow) if one < self._planned]
        return order_around(self.planner, self.shape, around, node)
