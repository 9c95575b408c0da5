"""Scatter, then a ring allgather: each target gets a part of its own, then all parts circulate (pure).

Open MPI's best broadcast of large messages. It takes 2 blocks (nodes - 1) / nodes steps where the nodes
divide the blocks. With fewer blocks than nodes some parts are empty, and the ring costs more.
"""

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan.planners.subgroups import balanced
from rdmacast.plan.transfers import Transfers, gathered, ints

_Numbers = NDArray[np.int64]


def steps(members: int, blocks: int) -> int:
    return scatter_allgather(members, blocks).steps


def scatter_allgather(members: int, blocks: int) -> Transfers:
    """Return the transfers: node 0 scatters balanced ranges, the v-th to node v, which then circulate."""
    if members == 1:
        return gathered([])
    parts = balanced(blocks, members)
    first = np.array([start for start, _ in parts])
    size = np.array([end - start for start, end in parts])
    given = np.arange(size[0], blocks)
    owner = np.repeat(np.arange(members), size)[given]
    scatter = Transfers(ints(given - size[0]), ints(np.zeros_like(given)), ints(owner), ints(given))
    turns = [_turn(turn, members, first, size, len(given)) for turn in range(members - 1)]
    return gathered([scatter, *turns])


def _turn(turn: int, members: int, first: _Numbers, size: _Numbers, begin: int) -> Transfers:
    """Return one round of the ring: each node passes on the part that it got in the round before.

    Node 0, which holds all, receives nothing.
    """
    source = np.arange(members - 1)
    part = (source - turn) % members
    count = size[part]
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    step = begin + turn * int(size.max()) + place
    sender = np.repeat(source, count)
    return Transfers(ints(step), ints(sender), ints(sender + 1), ints(np.repeat(first[part], count) + place))
