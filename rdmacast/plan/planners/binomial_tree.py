"""The binomial tree of whole messages: in each round all complete nodes send everything to one more (pure).

The scheme of torch.distributed's gloo. It takes blocks x ceil(log2 nodes) steps.
"""

import numpy as np

from rdmacast.plan.transfers import Transfers, ints


def steps(members: int, blocks: int) -> int:
    return blocks * (members - 1).bit_length()


def binomial_tree(members: int, blocks: int) -> Transfers:
    """Return the transfers: in round r node v < 2^r sends all blocks to node v + 2^r."""
    target = np.repeat(np.arange(1, members), blocks)
    block = np.tile(np.arange(blocks), members - 1)
    rounds = np.array([max(0, node.bit_length() - 1) for node in range(members)], dtype=np.int64)[target]
    step, source = rounds * blocks + block, target - (1 << rounds)
    return Transfers(ints(step), ints(source), ints(target), ints(block)).in_order()
