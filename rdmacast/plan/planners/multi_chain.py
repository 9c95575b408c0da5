"""Chains over a topology, the fastest nodes first, after BlitzScale (pure).

Sources whose sending would slow requests are left out while others hold the model. A scale-up domain is
one link of a chain: its ports take different blocks at once, and inside the domain each block spreads in
one step that uses no port. Targets are fed inside their leaf switch where what holds the model there is
fast enough. Unlike the paper's algorithm, which always extends the newest chain, a target goes to the
shortest chain that is fit, so that every source is used. Blocks are sent in execution order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan import CastShape, TransferPlan
from rdmacast.planners.topology import Site, Unit, domains_of, units_of
from rdmacast.transfers import Transfers, gathered, ints

_Numbers = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a chain: a unit that holds the model, or will, and sends to nobody yet."""

    unit: Unit
    hops: int
    chain: int


@dataclass(frozen=True, slots=True)
class _Edge:
    """`senders` give all blocks to `unit`, the ports on both sides taking turns."""

    senders: tuple[int, ...]
    unit: Unit


def multi_chain(shape: CastShape, sites: Sequence[Site] | None = None) -> TransferPlan:
    """`sites` are the nodes' places; without them all stand alike under one leaf switch."""
    sites = [Site()] * shape.nodes if sites is None else sites
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


def _near_targets(shape: CastShape, sites: Sequence[Site]) -> dict[int, int]:
    """Targets that share a scale-up domain with a source, and that source: they need no port."""
    numbers = domains_of(sites)
    holders = {numbers[source]: source for source in reversed(shape.sources)}
    return {node: holders[numbers[node]] for node in shape.targets if numbers[node] in holders}


def _first_tails(sources: Sequence[int], near: dict[int, int], sites: Sequence[Site]) -> list[_Tail]:
    """Who may send over the network at first: sources and the targets near them, by scale-up domain.

    Sources that serve prefill may not, unless there is nobody else.
    """
    free = [source for source in sources if not sites[source].serves_prefill]
    units = units_of([*free, *near] or sources, sites)
    return [_Tail(unit, 0, chain) for chain, unit in enumerate(units)]


def _in_order(waiting: Sequence[Unit], holding: Sequence[Unit]) -> list[Unit]:
    """By leaf, those whose sources are fastest first, leaves without a source last; then fastest first."""
    rates: dict[int, float] = {}
    for unit in holding:
        rates[unit.leaf] = rates.get(unit.leaf, 0.0) + unit.bytes_per_s
    return sorted(waiting, key=lambda unit: (-rates.get(unit.leaf, 0.0), unit.leaf, -unit.bytes_per_s))


def _feeders(unit: Unit, tails: Sequence[_Tail]) -> list[_Tail]:
    """The tails that feed a unit: as many as it takes to be as fast as the unit, shortest chains first.

    Of the unit's own leaf if the tails there are fast enough together.
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
    """Puts the edges' transfers into the earliest steps that the law of plans allows."""

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
        senders, takers = np.array(edge.senders), np.array(edge.unit.nodes)
        block = np.arange(self._blocks)
        source, target = senders[block % len(senders)], takers[block % len(takers)]
        step = _waves(self._held[source, block], min(len(senders), len(takers)))
        self._send(step, source, target, block)
        for node in edge.unit.nodes:
            other = target != node
            self._send(step[other] + 1, target[other], np.full(int(other.sum()), node), block[other])

    def _send(self, step: _Numbers, source: _Numbers, target: _Numbers, block: _Numbers) -> None:
        self._parts.append(Transfers(ints(step), ints(source), ints(target), ints(block)))
        self._held[target, block] = step + 1


def _waves(ready: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Steps for blocks of which `width` go at once, in order, none before the step at which it is ready."""
    first = np.maximum.reduceat(ready, np.arange(0, len(ready), width))
    count = np.arange(len(first))
    steps = np.maximum.accumulate(first - count) + count
    return np.asarray(steps[np.arange(len(ready)) // width])
