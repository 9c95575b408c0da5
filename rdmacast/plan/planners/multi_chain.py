"""Chains over a topology, the fastest nodes first, after BlitzScale §5.1 (pure).

A scale-up domain is one link of a chain: its ports receive different blocks at once, and inside the domain
each block spreads in one step that uses no port. Targets are fed inside their leaf switch where the holders
there are fast enough, so that one copy enters a leaf without a source. Unlike the paper's algorithm, which
always extends the newest chain, a target joins the shortest chain that is fit, so that every source is used;
sources whose links serving uses are left out before. Blocks are sent in execution order.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.topology import NodeTopology, Unit, domains_of, units_of
from rdmacast.plan.transfers import Transfers, gathered, ints

_Numbers = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a chain: a unit that holds the model, or will, and sends to no other yet."""

    unit: Unit
    hops: int
    chain: int


@dataclass(frozen=True, slots=True)
class ChainEdge:
    """An edge of a chain: `senders` send all blocks to `unit`, the ports on both sides in rotation."""

    senders: tuple[int, ...]
    unit: Unit

    @property
    def width(self) -> int:
        """The blocks that are sent at once."""
        return min(len(self.senders), len(self.unit.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """The chains of a cast: its `edges`, each after those that lead to it.

    `in_domain` maps targets that share a scale-up domain with a source to it: they use no port. `hops` are
    those of the longest chain.
    """

    in_domain: dict[int, int]
    edges: tuple[ChainEdge, ...]
    groups: tuple[tuple[int, ...], ...]
    hops: int


def chains_of(shape: CastShape) -> Chains:
    """Return the chains of a cast; without `sites` all nodes are alike under one leaf switch."""
    sites = shape.sites or (NodeTopology(),) * shape.nodes
    in_domain = _targets_in_domains(shape, sites)
    first = _first_tails(shape.sources, in_domain, sites)
    chains = [list(tail.unit.nodes) for tail in first]
    waiting = units_of([node for node in shape.targets if node not in in_domain], sites)
    tails, edges = _Tails(first), []
    for unit in _in_order(waiting, [tail.unit for tail in first]):
        feeders = tails.take(unit)
        edges.append(ChainEdge(tuple(node for tail in feeders for node in tail.unit.nodes), unit))
        chains[feeders[0].chain].extend(unit.nodes)
        tails.add(_Tail(unit, max(tail.hops for tail in feeders) + 1, feeders[0].chain))
    in_chains = {node for chain in chains for node in chain}
    alone = [(node,) for node in range(shape.nodes) if node not in in_chains]
    groups = (*map(tuple, chains), *alone)
    return Chains(in_domain=in_domain, edges=tuple(edges), groups=groups, hops=tails.hops)


def multi_chain(shape: CastShape) -> TransferPlan:
    """Return the plan of the chains of a cast."""
    chains = chains_of(shape)
    return TransferPlan(
        planner="multi-chain",
        shape=shape,
        groups=chains.groups,
        transfers=_Timetable(shape, chains.in_domain).run(chains.edges),
    )


def chain_part(shape: CastShape, node: int) -> list[tuple[int, int]]:
    """Return (source, block) in the order in which a target pulls.

    Of its domain's blocks it takes those of its own port from the senders, the others from the domain.
    """
    chains = chains_of(shape)
    if node in chains.in_domain:
        return [(chains.in_domain[node], block) for block in range(shape.blocks)]
    edge = next(edge for edge in chains.edges if node in edge.unit.nodes)
    senders, receivers = edge.senders, edge.unit.nodes
    pulls = []
    for block in range(shape.blocks):
        target, wave = receivers[block % len(receivers)], block // edge.width
        source = senders[block % len(senders)] if target == node else target
        pulls.append((wave + (target != node), target != node, block, source))
    return [(source, block) for _, _, block, source in sorted(pulls)]


def _targets_in_domains(shape: CastShape, sites: Sequence[NodeTopology]) -> dict[int, int]:
    """Return targets that share a scale-up domain with a source, and that source: they need no port."""
    numbers = domains_of(sites)
    holders = {numbers[source]: source for source in reversed(shape.sources)}
    return {node: holders[numbers[node]] for node in shape.targets if numbers[node] in holders}


def _first_tails(
    sources: Sequence[int], in_domain: dict[int, int], sites: Sequence[NodeTopology]
) -> list[_Tail]:
    """Return the first senders over the network: the sources with the targets in their scale-up domains."""
    units = units_of([*sources, *in_domain], sites)
    return [_Tail(unit, 0, chain) for chain, unit in enumerate(units)]


def _in_order(waiting: Sequence[Unit], holding: Sequence[Unit]) -> list[Unit]:
    """Order units by leaf: leaves with the fastest sources first, those without last; then fastest first."""
    rates: dict[str, float] = {}
    for unit in holding:
        rates[unit.leaf] = rates.get(unit.leaf, 0.0) + unit.bytes_per_s
    return sorted(waiting, key=lambda unit: (-rates.get(unit.leaf, 0.0), unit.leaf, -unit.bytes_per_s))


class _Tails:
    """The tails of the chains, the shortest first, by leaf and over all."""

    def __init__(self, tails: Sequence[_Tail]) -> None:
        self.hops = 0
        self._of_chain: dict[int, _Tail] = {}
        self._rates: defaultdict[str, float] = defaultdict(float)  # by leaf
        self._by_leaf: defaultdict[str, list[tuple[int, float, int]]] = defaultdict(list)
        self._all: list[tuple[int, float, int]] = []
        for tail in tails:
            self.add(tail)

    def __repr__(self) -> str:
        return f"<_Tails of {len(self._of_chain)} chains>"

    def add(self, tail: _Tail) -> None:
        """Add the tail of a chain without one."""
        key = tail.hops, -tail.unit.bytes_per_s, tail.chain
        self._of_chain[tail.chain] = tail
        self._rates[tail.unit.leaf] += tail.unit.bytes_per_s
        heappush(self._by_leaf[tail.unit.leaf], key)
        heappush(self._all, key)
        self.hops = max(self.hops, tail.hops)

    def take(self, unit: Unit) -> list[_Tail]:
        """Remove the tails that feed a unit: enough to match its rate, shortest chains first.

        Those of the unit's own leaf if they are fast enough together.
        """
        in_leaf = self._by_leaf[unit.leaf] if self._rates[unit.leaf] >= unit.bytes_per_s else []
        return self._shortest(in_leaf, unit) or self._shortest(self._all, unit)

    def _shortest(self, heap: list[tuple[int, float, int]], unit: Unit) -> list[_Tail]:
        chosen: list[_Tail] = []
        while heap and sum(tail.unit.bytes_per_s for tail in chosen) < unit.bytes_per_s:
            hops, _, chain = heappop(heap)
            tail = self._of_chain.get(chain)
            if tail is not None and tail.hops == hops:  # else it was taken out of the other heap
                del self._of_chain[chain]
                self._rates[tail.unit.leaf] -= tail.unit.bytes_per_s
                chosen.append(tail)
        return chosen


class _Timetable:
    """A scheduler of the edges' transfers into the earliest steps that the rules of plans allow."""

    def __init__(self, shape: CastShape, in_domain: dict[int, int]) -> None:
        self._blocks = shape.blocks
        self._held = np.zeros((shape.nodes, shape.blocks), dtype=np.int64)  # from which step on
        self._parts: list[Transfers] = []
        block = np.arange(shape.blocks)
        for target, source in in_domain.items():
            self._send(block, np.full(shape.blocks, source), np.full(shape.blocks, target), block)

    def run(self, edges: Sequence[ChainEdge]) -> Transfers:
        for edge in edges:
            self._feed(edge)
        return gathered(self._parts)

    def _feed(self, edge: ChainEdge) -> None:
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
