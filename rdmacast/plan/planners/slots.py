"""In which steps of a plan a node gets its blocks, and what their sources give before (pure)."""

from collections.abc import Mapping

import numpy as np

from rdmacast.plan import CastShape
from rdmacast.planners.catalog import PLANNERS

MOST_TRANSFERS = 1 << 15  # the whole plan is worked out: some 10 ms


def steps_of(planner: str, shape: CastShape, node: int) -> Mapping[int, tuple[int, int]]:
    """By block: the step in which the node gets it, and one more than the last before it in which its source
    gives something (0: none). Empty for a plan that is too large to be worked out whole by each node."""
    if (shape.nodes - len(shape.sources)) * shape.blocks > MOST_TRANSFERS:
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
