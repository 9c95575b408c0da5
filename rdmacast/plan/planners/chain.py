"""The chain: each node passes every block on to the next (pure).

A finely sliced ring broadcast is the same. It takes blocks + nodes - 2 steps; the first target is complete
as early as possible, and each further one a step later.
"""

import numpy as np

from rdmacast.plan.transfers import Transfers, ints


def steps(members: int, blocks: int) -> int:
    return 0 if members == 1 else blocks + members - 2


def chain(members: int, blocks: int) -> Transfers:
    """Return the transfers: node 0 sends all blocks to node 1, that to node 2, and so on."""
    target = np.repeat(np.arange(1, members), blocks)
    block = np.tile(np.arange(blocks), members - 1)
    return Transfers(ints(block + target - 1), ints(target - 1), ints(target), ints(block)).in_order()
