"""Sequential: the source sends everything to one target after the other (pure).

It takes blocks x (nodes - 1) steps.
"""

import numpy as np

from rdmacast.plan.transfers import Transfers, ints


def steps(members: int, blocks: int) -> int:
    return blocks * (members - 1)


def sequential(members: int, blocks: int) -> Transfers:
    """Return the transfers: node 0 sends all blocks to node 1, then to node 2, and so on."""
    step = np.arange((members - 1) * blocks)
    return Transfers(ints(step), ints(np.zeros_like(step)), ints(1 + step // blocks), ints(step % blocks))
