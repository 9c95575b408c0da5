"""k sources make k sub-groups that run one scheme side by side, each in a block order of its own (pure)."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from rdmacast.plan import CastShape, TransferPlan
from rdmacast.transfers import Ints, Transfers, gathered, ints

# How one node (number 0) gives `blocks` blocks to the others of `members` nodes.
Scheme = Callable[[int, int], Transfers]


def balanced(items: int, parts: int) -> tuple[tuple[int, int], ...]:
    """`parts` half-open ranges of `items` items, their sizes differing by at most one."""
    return tuple(pairwise(items * part // parts for part in range(parts + 1)))


def subgroups(shape: CastShape) -> tuple[tuple[int, ...], ...]:
    """One group a source, the source first; sizes differ by at most one, the larger ones first."""
    targets, groups, start = shape.targets, [], 0
    size, larger = divmod(shape.nodes, len(shape.sources))
    for index, source in enumerate(shape.sources):
        end = start + size - 1 + (index < larger)
        groups.append((source, *targets[start:end]))
        start = end
    return tuple(groups)


def shifted_orders(groups: int, blocks: int, alike: int = 1) -> tuple[Ints, ...]:
    """The block order of each group: all blocks, turned so that group i begins with chunk i. Each `alike`
    groups, if they are to have one order, have that of the first of them."""
    starts = [first for first, _ in balanced(blocks, groups)]
    return tuple(
        ints((starts[group // alike * alike] + np.arange(blocks)) % blocks) for group in range(groups)
    )


def plan_subgroups(
    planner: str, scheme: Scheme, shape: CastShape, *, whole: bool = False, alike: int = 1
) -> TransferPlan:
    """Each sub-group runs the scheme; their orders are shifted so that together they hold all early.

    The chunks are as many as there are groups with a target: where k exceeds half of the nodes, the
    sources left alone carry nothing.
    """
    groups = subgroups(shape)
    busy = [group for group in groups if len(group) > 1]
    orders = shifted_orders(len(busy), shape.blocks, alike) if busy else ()
    by_size: dict[int, Transfers] = {}
    parts = []
    for group, order in zip(busy, orders, strict=True):
        moved = by_size.get(len(group))
        if moved is None:
            moved = by_size[len(group)] = scheme(len(group), shape.blocks)
        nodes = ints(group)
        parts.append(Transfers(moved.step, nodes[moved.source], nodes[moved.target], order[moved.block]))
    return TransferPlan(planner=planner, shape=shape, groups=groups, transfers=gathered(parts), whole=whole)
