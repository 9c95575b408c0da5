"""Which nodes of a cast are slow by what their pulls took, and a plan that leaves them at its edge (pure)."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from rdmacast.plan import CastShape, TransferPlan
from rdmacast.planners.catalog import PLANNERS

SLOW = 2.0  # so many times the median of all pulls
_LEAST_PULLS = 4
_LEAST_SHARE = 0.75

Order = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Observed:
    """A pull that took `seconds`, or takes so long already; pulls of a target at once share their time."""

    source: int
    target: int
    seconds: float


def slow_nodes(pulls: Sequence[Observed]) -> frozenset[int]:
    """Nodes most of whose pulls were slow, both ways, though not because of another slow node.

    Whoever has most slow pulls is blamed first; what it took part in tells nothing of the others.
    """
    if len(pulls) < _LEAST_PULLS:
        return frozenset()
    limit_s = SLOW * median(pull.seconds for pull in pulls)
    left = list(pulls)
    found: set[int] = set()
    while True:
        all_, slow = Counter[int](), Counter[int]()
        for pull in left:
            ends = (pull.source, pull.target)
            all_.update(ends)
            slow.update(ends if pull.seconds > limit_s else ())
        blamed = [
            node
            for node, count in slow.most_common()
            if count >= _LEAST_PULLS and count >= _LEAST_SHARE * all_[node]
        ]
        if not blamed:
            return frozenset(found)
        found.add(blamed[0])
        left = [pull for pull in left if blamed[0] not in (pull.source, pull.target)]


def around(plan: TransferPlan, slow: Collection[int]) -> dict[int, Order] | None:
    """For each node what to pull from whom, in order: the plan's scheme over the others, from which the slow
    ones take turns. None if no source is left.

    Who holds a block already leaves it out.
    """
    shape = plan.shape
    fast = [node for node in range(shape.nodes) if node not in slow]
    sources = tuple(index for index, node in enumerate(fast) if node in shape.sources)
    if not sources or len(sources) == len(fast):
        return None
    inner = PLANNERS[plan.planner].plan(CastShape(nodes=len(fast), sources=sources, blocks=shape.blocks))
    orders: dict[int, Order] = {}
    for index, node in enumerate(fast):
        part = inner.receives(index)
        orders[node] = [
            (fast[source], block)
            for source, block in zip(part.source.tolist(), part.block.tolist(), strict=True)
        ]
    for turn, node in enumerate(sorted(slow)):
        orders[node] = [(fast[(block + turn) % len(fast)], block) for block in range(shape.blocks)]
    return orders
