"""One node's own part of a plan, computed without the whole plan (pure).

A binomial pipeline of thousands of nodes has millions of transfers, of which a node needs only its own.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import BINOMIAL, CHAIN, MULTI_CHAIN, PLANNERS
from rdmacast.plan.planners.multi_chain import chain_part
from rdmacast.plan.planners.subgroups import begins, subgroups

Order = tuple[tuple[int, int], ...]  # (source, block) in the order to pull

# A node's part of a scheme: (members, blocks, its number) to the sources and blocks in order.
_Part = Callable[[int, int, int], list[tuple[int, int]]]


def own_part(planner: str, shape: CastShape, node: int) -> Order:
    """Return what `TransferPlan.receives(node)` of the planner's plan returns, as (source, block)."""
    if node in shape.sources:
        return ()
    if planner == MULTI_CHAIN.name:
        return tuple(chain_part(shape, node))
    part = _PARTS.get(planner)
    if part is None:
        received = PLANNERS[planner].plan(shape).receives(node)
        return tuple(zip(received.source.tolist(), received.block.tolist(), strict=True))
    busy = [group for group in subgroups(shape) if len(group) > 1]
    index = next(index for index, group in enumerate(busy) if node in group)
    group, first = busy[index], begins(len(busy), shape.blocks, shape.borders)[index]
    pulled = part(len(group), shape.blocks, group.index(node))
    return tuple((group[source], (first + block) % shape.blocks) for source, block in pulled)


def _chain(members: int, blocks: int, node: int) -> list[tuple[int, int]]:
    return [(node - 1, block) for block in range(blocks)]


def _binomial(members: int, blocks: int, node: int) -> list[tuple[int, int]]:
    """Compute the steps of `binomial` for the node's own vertex."""
    dimensions = members.bit_length() - 1
    vertices = 1 << dimensions
    twins = members - vertices
    vertex = node if node < vertices else node - vertices + 1
    twin = vertices - 1 + vertex if vertex <= twins else vertex
    receiver, sender = vertex, twin
    only_receiver: int | None = None
    only_sender: int | None = None
    held: set[int] = set()
    part = []
    for step in range(blocks + dimensions - 1):
        bit = 1 << step % dimensions
        block = _outgoing(vertex ^ bit, step, dimensions, blocks)
        comes = block >= 0 and block not in held
        if comes and receiver == node:
            part.append((_sender(vertex ^ bit, step, dimensions, vertices, twins), block))
        if twin != vertex and only_receiver is not None:
            if sender == node:
                part.append((receiver, only_receiver))
            only_receiver = None
        if comes:
            held.add(block)
            only_receiver = block
        if twin != vertex and vertex & bit:
            receiver, sender = sender, receiver
            only_receiver, only_sender = only_sender, only_receiver
    if twin != vertex:
        for sending, receiving, only in ((receiver, sender, only_receiver), (sender, receiver, only_sender)):
            if receiving == node and only is not None:
                part.append((sending, only))
    return part


def _outgoing(vertex: int, step: int, dimensions: int, blocks: int) -> int:
    """Return the block that the vertex sends in the step; below 0 if it has none yet."""
    if vertex == 0:
        return min(step, blocks - 1)
    phase = step % dimensions
    ahead = next(ahead for ahead in range(dimensions) if vertex >> (phase + ahead) % dimensions & 1)
    return min(step + ahead - dimensions, blocks - 1)


def _sender(vertex: int, step: int, dimensions: int, vertices: int, twins: int) -> int:
    """Return the sending node of the vertex: twins swap after each step along a dimension set in it."""
    if not 1 <= vertex <= twins:
        return vertex
    rounds, phase = divmod(step, dimensions)
    swaps = rounds * vertex.bit_count() + (vertex & ((1 << phase) - 1)).bit_count()
    return vertex if swaps % 2 else vertices - 1 + vertex


_PARTS: Mapping[str, _Part] = MappingProxyType({BINOMIAL.name: _binomial, CHAIN.name: _chain})
