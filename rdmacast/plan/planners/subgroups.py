"""Sub-groups, one a source, which run a scheme in parallel with different block orders (pure)."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.transfers import Ints, Transfers, gathered, ints

# (members, blocks) to the transfers by which node 0 sends the blocks to the other members.
Scheme = Callable[[int, int], Transfers]


def balanced(items: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return `parts` half-open ranges of `items` items whose sizes differ by at most one."""
    return tuple(pairwise(items * part // parts for part in range(parts + 1)))


def begins(parts: int, blocks: int, borders: Sequence[int] = ()) -> tuple[int, ...]:
    """Return where `parts` parts of the blocks begin, each at another border (0 is one).

    The longest part is as short as possible, and each begins as near as possible to its place in a balanced
    division. With fewer borders than parts the division is balanced.
    """
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
    """Return the first border at which each part can begin if no later part is longer than `longest`."""
    found = [blocks]
    for _ in range(parts):
        place = bisect_left(borders, found[-1] - longest)
        found.append(borders[place] if place < len(borders) else blocks)
    return found[:0:-1]


def chunks(parts: int, blocks: int, borders: Sequence[int] = ()) -> tuple[tuple[int, int], ...]:
    """Return the half-open ranges that start at `begins`."""
    return tuple(pairwise((*begins(parts, blocks, borders), blocks)))


def subgroups(shape: CastShape) -> tuple[tuple[int, ...], ...]:
    """Return one group a source, the source first; sizes differ by at most one, the larger ones first."""
    targets, groups, start = shape.targets, [], 0
    size, larger = divmod(shape.nodes, len(shape.sources))
    for index, source in enumerate(shape.sources):
        end = start + size - 1 + (index < larger)
        groups.append((source, *targets[start:end]))
        start = end
    return tuple(groups)


def shifted_orders(groups: int, blocks: int, alike: int = 1, borders: Sequence[int] = ()) -> tuple[Ints, ...]:
    """Return the block order of each group: all blocks, rotated so that group i begins with chunk i.

    Each `alike` groups share the order of the first of them.
    """
    starts = begins(groups, blocks, borders)
    return tuple(
        ints((starts[group // alike * alike] + np.arange(blocks)) % blocks) for group in range(groups)
    )


def plan_subgroups(
    planner: str, scheme: Scheme, shape: CastShape, *, whole: bool = False, alike: int = 1
) -> TransferPlan:
    """Run the scheme in each sub-group, with orders shifted so that together they hold all blocks early.

    There are as many chunks as groups with a target: where k exceeds half of the nodes, the sources left
    alone send nothing.
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
