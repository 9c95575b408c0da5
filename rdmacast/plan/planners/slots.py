"""The steps of a plan in which a node gets its blocks, and the steps of their sources before (pure)."""

from collections.abc import Mapping

import numpy as np

from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS

MAX_SLOTTED_TRANSFERS = 1 << 15  # the whole plan is worked out: some 10 ms


def slots_of(planner: str, shape: CastShape, node: int) -> Mapping[int, tuple[int, int]]:
    """Return each block's step at the node, and one more than the source's step before it (0: none).

    Empty for a plan that is too large to be computed whole by each node.
    """
    if (shape.nodes - len(shape.sources)) * shape.blocks > MAX_SLOTTED_TRANSFERS:
        return {}
    transfers = PLANNERS[planner].plan(shape).transfers
    mine = np.flatnonzero(transfers.target == node)
    given = {
        int(source): np.unique(transfers.step[transfers.source == source])
        for source in np.unique(transfers.source[mine])
    }
    found: dict[int, tuple[int, int]] = {}
    for at in mine:
        step, gives = int(transfers.step[at]), given[int(transfers.source[at])]
        before = int(np.searchsorted(gives, step))
        found[int(transfers.block[at])] = step, int(gives[before - 1]) + 1 if before else 0
    return found
