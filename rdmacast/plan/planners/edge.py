"""A plan over a cast's fast nodes, with slow nodes at its edge that pull from them in rotation (pure)."""

from collections.abc import Sequence

import numpy as np

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.topology import near_of
from rdmacast.plan.transfers import Transfers, gathered, ints


def with_edge(inner: TransferPlan, shape: CastShape, edge: Sequence[int]) -> TransferPlan:
    """Add the slow nodes to `inner`, the plan for the other nodes of `shape` in their order.

    Those at the edge take each block from another node, as in `stragglers.order_around`. Their steps are
    last, but a node serves a block as soon as it has it.
    """
    others = [node for node in range(shape.nodes) if node not in edge]
    fast = np.array(others)
    slow = [node for node in sorted(edge) if node not in shape.sources]
    moved, block = inner.transfers, np.arange(shape.blocks)
    parts = [Transfers(moved.step, ints(fast[moved.source]), ints(fast[moved.target]), moved.block)]
    for node in slow:
        holders = np.array(near_of(node, others, shape.sites))
        sending = holders[(block + sorted(edge).index(node)) % len(holders)]
        parts.append(
            Transfers(ints(inner.steps + block), ints(sending), ints(np.full_like(block, node)), ints(block))
        )
    groups = [tuple(int(fast[node]) for node in group) for group in inner.groups]
    return TransferPlan(
        planner=inner.planner,
        shape=shape,
        groups=(*groups, *((node,) for node in sorted(edge))),
        transfers=gathered(parts),
    )
