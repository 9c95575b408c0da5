"""Chains over a topology, the fastest nodes first, after BlitzScale (pure).

Sources that serve prefill are left out while others hold the model. A scale-up domain is one link of a
chain: its ports receive different blocks at once, and inside the domain each block spreads in one step that
uses no port. Targets are fed inside their leaf switch where the holders there are fast enough. Unlike the
paper's algorithm, which always extends the newest chain, a target joins the shortest chain that is fit, so
that every source is used. Blocks are sent in execution order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.topology import NodeTopology, Unit, domains_of, units_of
from rdmacast.plan.transfers import Transfers, gathered, ints

_Numbers = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a chain: a unit that holds the model, or will, and sends to no other yet."""

    unit: Unit
    hops: int
    chain: int


@dataclass(frozen=True, slots=True)
class _Edge:
    """An edge of a chain: `senders` send all blocks to `unit`, the ports on both sides in rotation."""

    senders: tuple[int, ...]
    unit: Unit


def multi_chain(shape: CastShape, sites: Sequence[NodeTopology] | None = None) -> TransferPlan:
    """Return a plan of chains; without `sites` all nodes are alike under one leaf switch."""
    sites = [NodeTopology()] * shape.nodes if sites is None else sites
    if len(sites) != shape.nodes:
        raise ValueError(f"{len(sites)} sites were given for {shape.nodes} nodes")
    near = _near_targets(shape, sites)
    tails = _first_tails(shape.sources, near, sites)
    chains = [list(tail.unit.nodes) for tail in tails]
    waiting = units_of([node for node in shape.targets if node not in near], sites)
    edges = []
    for unit in _in_order(waiting, [tail.unit for tail in tails]):
        feeders = _feeders(unit, tails)
        tails = [tail for tail in tails if tail not in feeders]
        edges.append(_Edge(tuple(node for tail in feeders for node in tail.unit.nodes), unit))
        chains[feeders[0].chain].extend(unit.nodes)
        tails.append(_Tail(unit, max(tail.hops for tail in feeders) + 1, feeders[0].chain))
    in_chains = {node for chain in chains for node in chain}
    alone = [(node,) for node in range(shape.nodes) if node not in in_chains]
    return TransferPlan(
        planner="multi-chain",
        shape=shape,
        groups=(*map(tuple, chains), *alone),
        transfers=_Timetable(shape, near).run(edges),
        domains=ints(domains_of(sites)),
    )


def _near_targets(shape: CastShape, sites: Sequence[NodeTopology]) -> dict[int, int]:
    """Return targets that share a scale-up domain with a source, and that source: they need no port."""
    numbers = domains_of(sites)
    holders = {numbers[source]: source for source in reversed(shape.sources)}
    return {node: holders[numbers[node]] for node in shape.targets if numbers[node] in holders}


def _first_tails(sources: Sequence[int], near: dict[int, int], sites: Sequence[NodeTopology]) -> list[_Tail]:
    """Return the first senders over the network: sources and the targets near them, by scale-up domain.

    Sources that serve prefill send only if there are no others.
    """
    free = [source for source in sources if not sites[source].serves_prefill]
    units = units_of([*free, *near] or sources, sites)
    return [_Tail(unit, 0, chain) for chain, unit in enumerate(units)]


def _in_order(waiting: Sequence[Unit], holding: Sequence[Unit]) -> list[Unit]:
    """Order units by leaf: leaves with the fastest sources first, those without last; then fastest first."""
    rates: dict[int, float] = {}
    for unit in holding:
        rates[unit.leaf] = rates.get(unit.leaf, 0.0) + unit.bytes_per_s
    return sorted(waiting, key=lambda unit: (-rates.get(unit.leaf, 0.0), unit.leaf, -unit.bytes_per_s))


def _feeders(unit: Unit, tails: Sequence[_Tail]) -> list[_Tail]:
    """Return the tails that feed a unit: enough to match its rate, shortest chains first.

    Those of the unit's own leaf if they are fast enough together.
    """
    near = [tail for tail in tails if tail.unit.leaf == unit.leaf]
    fit = near if sum(tail.unit.bytes_per_s for tail in near) >= unit.bytes_per_s else tails
    chosen: list[_Tail] = []
    for tail in sorted(fit, key=lambda tail: (tail.hops, -tail.unit.bytes_per_s, tail.chain)):
        if chosen and sum(tail.unit.bytes_per_s for tail in chosen) >= unit.bytes_per_s:
            break
        chosen.append(tail)
    return chosen


class _Timetable:
    """A scheduler of the edges' transfers into the earliest steps that the rules of plans allow."""

    def __init__(self, shape: CastShape, near: dict[int, int]) -> None:
        self._blocks = shape.blocks
        self._held = np.zeros((shape.nodes, shape.blocks), dtype=np.int64)  # from which step on
        self._parts: list[Transfers] = []
        block = np.arange(shape.blocks)
        for target, source in near.items():
            self._send(block, np.full(shape.blocks, source), np.full(shape.blocks, target), block)

    def run(self, edges: Sequence[_Edge]) -> Transfers:
        for edge in edges:
            self._feed(edge)
        return gathered(self._parts)

    def _feed(self, edge: _Edge) -> None:
        senders, receivers = np.array(edge.senders), np.array(edge.unit.nodes)
        block = np.arange(self._blocks)
        source, target = senders[block % len(senders)], receivers[block % len(receivers)]
        step = _waves(self._held[source, block], min(len(senders), len(receivers)))
        self._send(step, source, target, block)
        for node in edge.unit.nodes:
            other = target != node
            self._send(step[other] + 1, target[other], np.full(int(other.sum()), node), block[other])

    def _send(self, step: _Numbers, source: _Numbers, target: _Numbers, block: _Numbers) -> None:
        self._parts.append(Transfers(ints(step), ints(source), ints(target), ints(block)))
        self._held[target, block] = step + 1


def _waves(ready: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return steps for blocks of which `width` are sent at once, in order, none before it is ready."""
    first = np.maximum.reduceat(ready, np.arange(0, len(ready), width))
    count = np.arange(len(first))
    steps = np.maximum.accumulate(first - count) + count
    return np.asarray(steps[np.arange(len(ready)) // width])
