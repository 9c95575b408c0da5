"""All planners by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners import binomial, binomial_tree, chain, scatter_allgather, sequential, tree
from rdmacast.plan.planners.multi_chain import multi_chain
from rdmacast.plan.planners.subgroups import Scheme, plan_subgroups


class TransferPlanner(Protocol):
    """A planner of transfers; pure, and the same for the same shape."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """The scheme, and its steps with N nodes, one source, b blocks and no topology, in a line."""
        ...

    def plan(self, shape: CastShape) -> TransferPlan:
        """Return a plan, which is valid for every shape."""
        ...

    def steps(self, shape: CastShape) -> int:
        """Return the number of steps of the plan, which is made for this at most where it has a topology."""
        ...


@dataclass(frozen=True, slots=True)
class SubgroupPlanner:
    """A scheme for one source, run by k sub-groups in parallel; each `alike` of them share a block order."""

    name: str
    summary: str
    scheme: Scheme
    steps_of: Callable[[int, int], int]
    whole: bool = False
    alike: int = 1

    def plan(self, shape: CastShape) -> TransferPlan:
        return plan_subgroups(self.name, self.scheme, shape, whole=self.whole, alike=self.alike)

    def steps(self, shape: CastShape) -> int:
        size, larger = divmod(shape.nodes, len(shape.sources))
        sizes = {size, size + 1} if larger else {size}
        return max(self.steps_of(members, shape.blocks) for members in sizes)


@dataclass(frozen=True, slots=True)
class MultiChainPlanner:
    """Chains over the topology of a shape; without one, one chain a source."""

    name: str = "multi-chain"
    summary: str = "chains over a topology, blocks in execution order: b + N - 2"

    def plan(self, shape: CastShape) -> TransferPlan:
        return multi_chain(shape)

    def steps(self, shape: CastShape) -> int:
        if shape.sites:
            return multi_chain(shape).steps
        return chain.steps(-(-shape.nodes // len(shape.sources)), shape.blocks)


BINOMIAL = SubgroupPlanner(
    "binomial", "binomial pipeline: b + ceil(log2 N) - 1", binomial.binomial, binomial.steps
)
CHAIN = SubgroupPlanner("chain", "each node passes on to the next: b + N - 2", chain.chain, chain.steps)
MULTI_CHAIN = MultiChainPlanner()
# For what turning the orders is worth.
HALF_TURNED = replace(
    BINOMIAL, name="binomial-half-turned", summary="the same, each two sub-groups in one order", alike=2
)
UNTURNED = replace(
    BINOMIAL, name="binomial-unturned", summary="the same, all sub-groups in one order", alike=1 << 30
)

PLANNERS: Mapping[str, TransferPlanner] = MappingProxyType(
    {
        planner.name: planner
        for planner in (
            BINOMIAL,
            HALF_TURNED,
            UNTURNED,
            CHAIN,
            MULTI_CHAIN,
            SubgroupPlanner("tree", "complete binary tree: 2(b - 1) + D", tree.tree, tree.steps),
            SubgroupPlanner(
                "scatter-allgather",
                "scatter, then a ring: about 2b(N - 1)/N",
                scatter_allgather.scatter_allgather,
                scatter_allgather.steps,
            ),
            SubgroupPlanner(
                "binomial-tree",
                "whole messages down a binomial tree: b ceil(log2 N)",
                binomial_tree.binomial_tree,
                binomial_tree.steps,
                whole=True,
            ),
            SubgroupPlanner(
                "sequential", "one target after the other: b(N - 1)", sequential.sequential, sequential.steps
            ),
        )
    }
)


def bound(shape: CastShape) -> int:
    """Return the fewest steps that any plan can take without scale-up domains."""
    if len(shape.sources) == shape.nodes:
        return 0
    doublings = (-(-shape.nodes // len(shape.sources)) - 1).bit_length()
    return shape.blocks + doublings - 1
