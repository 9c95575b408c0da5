"""A cast as its nodes run it: blocks, orders and slots (pure)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rdmacast.bitfield import MAX_BLOCKS
from rdmacast.cast.record import NO_TIER, CastPlan
from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.own_part import Order
from rdmacast.plan.planners.slots import slots_of
from rdmacast.plan_slot import PlanSlot, plan_mark
from rdmacast.stragglers.slow_nodes import order_around


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec:
    """A cast as its nodes run it. `borders` are those of the plan (see CastShape), equal at all members.

    In a pull the sources are taken to hold everything, and learn of nothing but its reads.

    Raises ValueError, CastError if this release cannot run it.
    """

    plan: CastPlan
    borders: tuple[int, ...] = ()
    is_pull: bool = False

    def __post_init__(self) -> None:
        if self.blocks > MAX_BLOCKS:
            raise ValueError(f"a cast has at most {MAX_BLOCKS} blocks, not {self.blocks}")
        if self.plan.planner not in PLANNERS:
            raise ValueError(f"there is no planner {self.plan.planner!r}; use one of {', '.join(PLANNERS)}")
        self.shape  # noqa: B018  # its own checks

    @property
    def blocks(self) -> int:
        return self.plan.blocks

    @property
    def block_s(self) -> float:
        """The seconds that a block should take over a link; 0 if unknown."""
        plan = self.plan
        return plan.block_bytes / plan.link_bytes_s if plan.link_bytes_s > 0 else 0.0

    @property
    def shape(self) -> CastShape:
        """Of the plan."""
        plan = self.plan
        return CastShape(
            nodes=plan.planned,
            sources=plan.sources,
            blocks=plan.blocks,
            borders=self.borders,
            sites=plan.sites[: plan.planned],
        )

    def node(self, name: str) -> int:
        """Return the number of a member. Raises ValueError if none has that name."""
        for index, member in enumerate(self.plan.members):
            if member.node == name:
                return index
        raise ValueError(f"no node {name!r} is in cast {self.plan.cast_id}")

    @property
    def holders(self) -> tuple[int, ...]:
        """The sources that hold everything from the start; others still read it from the store."""
        if self.is_pull:
            return self.plan.sources
        return tuple(one for one in self.plan.sources if self.plan.members[one].tier != NO_TIER)

    def extent(self, block: int) -> tuple[int, int]:
        """Return (offset, size) of a block in the region."""
        offset = block * self.plan.block_bytes
        return offset, min(self.plan.block_bytes, self.plan.nbytes - offset)

    def near(self, node: int) -> frozenset[int]:
        """Return the other members under the leaf switch of a member; none where all are alike."""
        sites = self.plan.sites
        return frozenset(
            other for other, site in enumerate(sites) if other != node and site.leaf == sites[node].leaf
        )

    def slots(self, node: int) -> Mapping[int, PlanSlot]:
        """Return each block's slot at the node, if the plan has slots."""
        if not self.plan.in_slots or self.plan.edge or node >= self.plan.planned:
            return {}
        mark = plan_mark(self.plan.cast_id)
        steps = slots_of(self.plan.planner, self.shape, node)
        return {block: PlanSlot(mark=mark, step=step, after=after) for block, (step, after) in steps.items()}

    def order(self, node: int, slow: Collection[int] | None = None) -> Order | None:
        """Return the node's own part of the plan around the slow nodes; None if there is no such plan.

        The slow nodes are those of the edge unless others are given.
        """
        known = max(node + 1, self.plan.planned)  # nodes that join after this one have no part in its order
        around = [one for one in (self.plan.edge if slow is None else slow) if one < known]
        late_sites = self.plan.sites[self.plan.planned : known]
        return order_around(self.plan.planner, self.shape, around, node, late_sites)
