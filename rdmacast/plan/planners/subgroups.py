"""k sources make k sub-groups that run one scheme side by side, each in a block order of its own (pure)."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from rdmacast.plan import CastShape, TransferPlan
from rdmacast.transfers import Ints, Transfers, gathered, ints

# How one node (number 0) gives `blocks` blocks to the others of `members` nodes.
Scheme = Callable[[int, int], Transfers]


def balanced(items: int, parts: int) -> tuple[tuple[int, int], ...]:
    """`parts` half-open ranges of `items` items, their sizes differing by at most one."""
    return tuple(pairwise(items * part // parts for part in range(parts + 1)))


def begins(parts: int, blocks: int, borders: Sequence[int] = ()) -> tuple[int, ...]:
    """Where `parts` parts of the blocks begin: each at another border (0 is one), so that the longest part is
    as short as can be, and else near to where it would if all were balanced. Where there are fewer borders
    than parts, balanced they are."""
    even = tuple(first for first, _ in balanced(blocks, parts))
    known = sorted({0, *borders})
    if len(known) < parts:
        return even
    lengths = range(1, blocks + 1)
    reaches = bisect_left(lengths, True, key=lambda longest: not _earliest(parts, blocks, known, longest)[0])
    longest = lengths[reaches]
    earliest = _earliest(parts, blocks, known, longest)
    found: list[int] = []
    for part, wanted in enumerate(even):
        first = bisect_left(known, max(earliest[part], found[-1] + 1 if found else 0))
        last = bisect_right(known, found[-1] + longest if found else 0)
        last = min(last, len(known) - (parts - 1 - part))  # one is left for each of the others
        found.append(min(known[first:last], key=lambda border: abs(border - wanted)))
    return tuple(found)


def _earliest(parts: int, blocks: int, borders: Sequence[int], longest: int) -> list[int]:
    """The first border at which each part can begin if none from there on is longer than that."""
    found = [blocks]
    for _ in range(parts):
        place = bisect_left(borders, found[-1] - longest)
        found.append(borders[place] if place < len(borders) else blocks)
    return found[:0:-1]


def chunks(parts: int, blocks: int, borders: Sequence[int] = ()) -> tuple[tuple[int, int], ...]:
    """The half-open ranges that begin there."""
    return tuple(pairwise((*begins(parts, blocks, borders), blocks)))


def subgroups(shape: CastShape) -> tuple[tuple[int, ...], ...]:
    """One group a source, the source first; sizes differ by at most one, the larger ones first."""
    targets, groups, start = shape.targets, [], 0
    size, larger = divmod(shape.nodes, len(shape.sources))
    for index, source in enumerate(shape.sources):
        end = start + size - 1 + (index < larger)
        groups.append((source, *targets[start:end]))
        start = end
    return tuple(groups)


def shifted_orders(groups: int, blocks: int, alike: int = 1, borders: Sequence[int] = ()) -> tuple[Ints, ...]:
    """The block order of each group: all blocks, turned so that group i begins with chunk i. Each `alike`
    groups, if they are to have one order, have that of the first of them."""
    starts = begins(groups, blocks, borders)
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
    orders = shifted_orders(len(busy), shape.blocks, alike, shape.borders) if busy else ()
    by_size: dict[int, Transfers] = {}
    parts = []
    for group, order in zip(busy, orders, strict=True):
        moved = by_size.get(len(group))
        if moved is None:
            moved = by_size[len(group)] = scheme(len(group), shape.blocks)
        nodes = ints(group)
        parts.append(Transfers(moved.step, nodes[moved.source], nodes[moved.target], order[moved.block]))
    return TransferPlan(planner=planner, shape=shape, groups=groups, transfers=gathered(parts), whole=whole)
