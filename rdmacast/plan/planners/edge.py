"""A plan over the fast nodes of a cast, from which slow ones take turns at its edge (pure)."""

from collections.abc import Sequence

import numpy as np

from rdmacast.plan import CastShape, TransferPlan
from rdmacast.transfers import Transfers, gathered, ints


def with_edge(inner: TransferPlan, shape: CastShape, edge: Sequence[int]) -> TransferPlan:
    """`inner` is for the nodes of `shape` that are not at the edge, in their order.

    Those at the edge take each block from another node, as in `stragglers.order_around`. Their steps come
    last, but whoever carries the plan out gives a block as soon as it is there.
    """
    fast = np.array([node for node in range(shape.nodes) if node not in edge])
    slow = [node for node in sorted(edge) if node not in shape.sources]
    moved, block = inner.transfers, np.arange(shape.blocks)
    parts = [Transfers(moved.step, ints(fast[moved.source]), ints(fast[moved.target]), moved.block)]
    for node in slow:
        giver = fast[(block + sorted(edge).index(node)) % len(fast)]
        parts.append(
            Transfers(ints(inner.steps + block), ints(giver), ints(np.full_like(block, node)), ints(block))
        )
    groups = [tuple(int(fast[node]) for node in group) for group in inner.groups]
    return TransferPlan(
        planner=inner.planner,
        shape=shape,
        groups=(*groups, *((node,) for node in sorted(edge))),
        transfers=gathered(parts),
    )
