"""The parts of nodes that join a cast while it runs (pure).

They extend the plan at ports that it leaves free. A node that took what it lacks from any holder would share
the source's port with the plan, and all nodes behind it would receive at half the rate.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import MULTI_CHAIN, PLANNERS
from rdmacast.plan.planners.own_part import Order, own_part
from rdmacast.plan.topology import NodeTopology

_MAX_TRANSFERS = 1 << 12  # of the plan by which free ports are found, in a millisecond or two
_MIN_BLOCKS = 16

_Shares = tuple[tuple[int, float], ...]


def late_part(planner: str, shape: CastShape, late: int, sites: Sequence[NodeTopology] = ()) -> Order:
    """Return (source, block) in the order to pull for node `shape.nodes + late` of the cast.

    Late nodes join the sub-groups in turn, the smallest one first. Where the shape has a topology, `sites` is
    that of the late nodes up to this one, and sub-groups that end under the node's leaf switch come first.
    The nodes of a sub-group can send one copy more than the plan has them send. The first late node takes it,
    from each as much as it can send; the next ones continue from that one as a chain.
    """
    most = max(_MIN_BLOCKS, _MAX_TRANSFERS // shape.nodes)
    groups, shares = _free_shares(planner, shape.nodes, shape.sources, min(shape.blocks, most), shape.sites)
    turn, before = _turn(groups, shape, late, sites)
    if before is not None:
        senders = [shape.nodes + before] * shape.blocks
    else:
        senders = _in_turn(shares[turn], shape.blocks)
    group = groups[turn]
    turned = planner != MULTI_CHAIN.name and len(group) > 1
    first = own_part(planner, shape, group[1])[0][1] if turned else 0
    return tuple((source, (first + place) % shape.blocks) for place, source in enumerate(senders))


def _turn(
    groups: Sequence[tuple[int, ...]], shape: CastShape, late: int, sites: Sequence[NodeTopology]
) -> tuple[int, int | None]:
    """Return the place of the sub-group that a late node joins, and the late node before it there."""
    if not shape.sites:
        turn = late % len(groups)
        return turn, late - len(groups) if late >= len(groups) else None
    leaves = [shape.sites[group[-1]].leaf for group in groups]
    joined: list[list[int]] = [[] for _ in groups]
    for number in range(late + 1):
        leaf = sites[number].leaf
        turn = min(range(len(groups)), key=lambda place: (leaves[place] != leaf, len(joined[place]), place))
        leaves[turn] = leaf
        joined[turn].append(number)
    return turn, joined[turn][-2] if len(joined[turn]) > 1 else None


@lru_cache(maxsize=64)
def _free_shares(
    planner: str,
    nodes: int,
    sources: tuple[int, ...],
    blocks: int,
    sites: tuple[NodeTopology, ...] = (),
) -> tuple[tuple[tuple[int, ...], ...], tuple[_Shares, ...]]:
    """Return the sub-groups, the smallest first, and for each (node, the part of a copy that it can send)."""
    plan = PLANNERS[planner].plan(CastShape(nodes=nodes, sources=sources, blocks=blocks, sites=sites))
    sent = np.bincount(plan.transfers.source, minlength=nodes)
    free = np.maximum(0, blocks - sent) / blocks
    groups = tuple(sorted(plan.groups, key=len))
    return groups, tuple(tuple((node, float(free[node])) for node in group) for group in groups)


def _in_turn(shares: _Shares, count: int) -> list[int]:
    """Return `count` nodes, each as often as its share is of all, and evenly spread."""
    whole = sum(share for _, share in shares)
    due = dict.fromkeys((node for node, _ in shares), 0.0)
    chosen = []
    for _ in range(count):
        for node, share in shares:
            due[node] += share / whole
        chosen.append(max(due, key=lambda node: due[node]))
        due[chosen[-1]] -= 1.0
    return chosen
