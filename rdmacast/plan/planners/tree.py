"""The complete binary tree: each node passes every block on to two children, one after the other (pure).

With D the costliest way from the root, a first child costing one step and a second child two, it takes
2 (blocks - 1) + D steps: each inner link is busy half of the time. With two nodes it is a chain.
"""

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan.transfers import Transfers, ints


def steps(members: int, blocks: int) -> int:
    if members == 1:
        return 0
    return _pace(members) * (blocks - 1) + int(_costs(members).max())


def tree(members: int, blocks: int) -> Transfers:
    """Return the transfers: node v passes blocks on to nodes 2v + 1 and 2v + 2."""
    target = np.repeat(np.arange(1, members), blocks)
    block = np.tile(np.arange(blocks), members - 1)
    step = _pace(members) * block + _costs(members)[target] - 1
    return Transfers(ints(step), ints((target - 1) // 2), ints(target), ints(block)).in_order()


def _pace(members: int) -> int:
    """Return the steps between two blocks: two as soon as the root has a second child."""
    return 1 if members == 2 else 2


def _costs(members: int) -> NDArray[np.int64]:
    """Return for each node the steps from the root's start of a block until the node has it."""
    costs = np.zeros(members, dtype=np.int64)
    for node in range(1, members):
        costs[node] = costs[(node - 1) // 2] + (1 if node % 2 else 2)
    return costs
