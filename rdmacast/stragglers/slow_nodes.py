"""Slow nodes of a cast by the durations of pulls, and plans that leave them at its edge (pure).

A pull is held back by the port of its source or by that of its target: one of both is busy with it, or with
others at the same time. Where neither port carried half of the typical rate during a pull, one of the two
nodes is slow by itself; the other pulls of both show which one.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.late import late_part
from rdmacast.plan.planners.own_part import Order, own_part
from rdmacast.plan.topology import NodeTopology, near_of

SLOW = 2.0  # under half of the typical rate
_MIN_PULLS = 3
_MIN_PULLS_TO_RATE = 2
_MIN_SLOW_SHARE = 0.75
# The part of a rest that counts as busy: what follows may come from a buffer, or pass a
# shaper that the rest filled. Else a port that forwards rare arrivals at once looks fast.
_BURST_S = 0.01
_LONG_REST_S = 1.0  # only the rate over a rest and what follows is the port's
_TICK_S = 1e-3  # of the clocks that pulls are timed by
_OPEN = 0.5  # of a block: what counts of one under way
_MIN_NODES = 3  # of two nodes neither is typical

_Port = tuple[int, bool]  # a node, and whether it is the sending port


@dataclass(frozen=True, slots=True)
class ObservedPull:
    """A pull of one block, by the detector's clock; `is_open` if it is still pending at `ended_s`."""

    source: int
    target: int
    started_s: float
    ended_s: float
    is_open: bool = False

    @property
    def until_s(self) -> float:
        """When it ended, or a tick after it began."""
        return max(self.ended_s, self.started_s + _TICK_S)

    @property
    def seconds(self) -> float:
        return self.until_s - self.started_s


def slow_nodes(
    pulls: Sequence[ObservedPull], suspects: Collection[int] = (), max_blocks_per_s: float | None = None
) -> frozenset[int]:
    """Return the nodes most of whose pulls were slow, though not because of another slow node.

    The node with most slow pulls is blamed first, of equals one of the `suspects`, and its pulls are then
    left out for the others. A single source is never returned, since no plan avoids it, and is blamed for
    another's slow pulls only if it is suspected. `max_blocks_per_s` is the measured rate of the links, None
    if unknown: what arrived faster, out of a buffer, is not typical.
    """
    classified, sources = _classified(pulls, max_blocks_per_s), _sources(pulls)
    unavoidable = sources if len(sources) == 1 else set[int]()
    found: set[int] = set()
    while True:
        others = [one for one in classified if not {one.pull.source, one.pull.target} & found]
        blamed = _most_blamed(others, suspects, unavoidable - set(suspects))
        if blamed is None:
            return frozenset(found - unavoidable)
        found.add(blamed)


def slow_neighbours(
    pulls: Sequence[ObservedPull], slow: Collection[int], max_blocks_per_s: float | None = None
) -> frozenset[int]:
    """Return nodes with slow pulls to or from the slow ones: they may be the cause instead."""
    pairs = [{one.pull.source, one.pull.target} for one in _classified(pulls, max_blocks_per_s) if one.slow]
    return frozenset().union(*(pair for pair in pairs if pair & set(slow))) - set(slow)


def order_around(
    planner: str,
    shape: CastShape,
    slow: Collection[int],
    node: int,
    late_sites: Sequence[NodeTopology] = (),
) -> Order | None:
    """Return the node's order of pulls around the slow nodes; None where all targets are slow.

    The others run the planner's scheme, and the slow nodes pull from them in rotation, under their leaf
    switch if there are any. Sources that are all slow serve nevertheless. Nodes from `shape.nodes` on joined
    the cast later; `late_sites` is their topology.
    """
    slow = set(slow)
    if slow.issuperset(shape.sources):
        slow -= set(shape.sources)
    fast = [member for member in range(shape.nodes) if member not in slow]
    sources = tuple(index for index, member in enumerate(fast) if member in shape.sources)
    if len(sources) == len(fast):
        return None
    sites = (*shape.sites, *late_sites) if shape.sites else ()
    if node in slow:
        turn, fast = sorted(slow).index(node), near_of(node, fast, sites)
        return tuple((fast[(block + turn) % len(fast)], block) for block in range(shape.blocks))
    inner_sites = tuple(shape.sites[member] for member in fast) if shape.sites else ()
    inner = replace(shape, nodes=len(fast), sources=sources, sites=inner_sites)
    if node < shape.nodes:
        part = own_part(planner, inner, fast.index(node))
    else:
        late = [member for member in range(shape.nodes, node + 1) if member not in slow]
        joined = [sites[member] for member in late] if sites else []
        part, fast = late_part(planner, inner, len(late) - 1, joined), fast + late
    return tuple((fast[source], block) for source, block in part)


class _Pace(Enum):
    SLOW = "slow"
    BURST = "burst"  # fast after a rest, which shows nothing
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class _ClassifiedPull:
    """A pull, and how fast its source sent and its target received while it lasted."""

    pull: ObservedPull
    sent: "_Pace"
    received: "_Pace"

    @property
    def slow(self) -> bool:
        return self.sent is self.received is _Pace.SLOW


def _by_port(pulls: Iterable[ObservedPull]) -> Mapping[_Port, list[ObservedPull]]:
    ports: defaultdict[_Port, list[ObservedPull]] = defaultdict(list)
    for pull in pulls:
        ports[pull.source, True].append(pull)
        ports[pull.target, False].append(pull)
    return ports


def _sources(pulls: Iterable[ObservedPull]) -> set[int]:
    """Return the nodes that send and receive nothing."""
    return {pull.source for pull in pulls} - {pull.target for pull in pulls}


def _typical_rate(ended: Iterable[ObservedPull], max_blocks_per_s: float | None) -> float | None:
    """Return the median of the nodes' rates at their better ports, in blocks/s; None with too few pulls."""
    rates: dict[int, float] = {}
    ports = _by_port(ended)
    for (node, _), pulls in ports.items():
        if len(pulls) >= _MIN_PULLS_TO_RATE:
            rates[node] = max(rates.get(node, 0.0), _rate(pulls))
    if len(rates) < _MIN_NODES:
        return None
    typical = sorted(rates.values())[len(rates) // 2]
    return min(rate for rate in (typical, _sustained_rate(ports), max_blocks_per_s) if rate is not None)


def _sustained_rate(ports: Mapping[_Port, Sequence[ObservedPull]]) -> float | None:
    """Return the best rate of a port without rests, which no buffer raises, in blocks/s.

    None if all such ports have a node in common, which may be slow itself.
    """
    rates: list[tuple[float, set[int]]] = []
    for pulls in ports.values():
        run: list[ObservedPull] = []
        for pull in sorted(pulls, key=lambda pull: pull.started_s):
            if run and pull.started_s > max(one.until_s for one in run) + _TICK_S:
                run = []
            run.append(pull)
            first, last = run[0].until_s, max(one.until_s for one in run)
            if len(run) >= _MIN_PULLS and last > first:
                nodes = {node for one in run for node in (one.source, one.target)}
                rates.append(((len(run) - 1) / (last - first), nodes))
    if not rates or set.intersection(*(nodes for _, nodes in rates)):
        return None
    return max(rate for rate, _ in rates)


def _rate(pulls: Sequence[ObservedPull]) -> float:
    """Return the rate of a port while it was busy, in blocks/s."""
    return len(pulls) / _busy_s(pulls)


def _busy_s(pulls: Sequence[ObservedPull]) -> float:
    """Return how long at least one pull was pending, plus the first part of each rest between them."""
    busy_s, until_s = 0.0, min(pull.started_s for pull in pulls)
    for pull in sorted(pulls, key=lambda pull: pull.started_s):
        busy_s += min(_BURST_S, max(0.0, pull.started_s - until_s))
        busy_s += max(0.0, pull.until_s - max(pull.started_s, until_s))
        until_s = max(until_s, pull.until_s)
    return busy_s


def _classified(pulls: Sequence[ObservedPull], max_blocks_per_s: float | None) -> list[_ClassifiedPull]:
    """Classify the pulls; empty where too little is known of the typical rate, or no pull can be slow."""
    typical = _typical_rate([pull for pull in pulls if not pull.is_open], max_blocks_per_s)
    if typical is None:
        return []
    # A port carried at least the pull itself, so a fast pull is never slow, and usually all are fast.
    if not any(typical * pull.seconds > SLOW * (_OPEN if pull.is_open else 1.0) for pull in pulls):
        return []
    ports = _by_port(pulls)
    return [_classify(pull, ports, typical) for pull in pulls]


def _classify(
    pull: ObservedPull, ports: Mapping[_Port, list[ObservedPull]], typical: float
) -> _ClassifiedPull:
    sent = _pace(ports[pull.source, True], pull, typical)
    return _ClassifiedPull(pull, sent, _pace(ports[pull.target, False], pull, typical))


def _pace(pulls: Iterable[ObservedPull], during: ObservedPull, typical: float) -> _Pace:
    """Return the pace of a port during a pull."""
    blocks, rested_s = 0.0, _LONG_REST_S
    for pull in pulls:
        both_s = min(pull.until_s, during.until_s) - max(pull.started_s, during.started_s)
        if both_s > 0:
            blocks += both_s / pull.seconds * (_OPEN if pull.is_open else 1.0)
        if pull.started_s < during.started_s:
            rested_s = min(rested_s, max(0.0, during.started_s - pull.until_s))
    if blocks * SLOW < typical * during.seconds:
        return _Pace.SLOW
    return _Pace.BURST if blocks * SLOW < typical * (during.seconds + rested_s) else _Pace.FAST


def _most_blamed(
    classified: Iterable[_ClassifiedPull], suspects: Collection[int], spared: Collection[int]
) -> int | None:
    """Return the node with most slow pulls, besides the spared ones; None if there is none.

    Of equals a suspect comes first, then a node that is slow both ways, then one that sends slowly.
    """
    slow, fast = Counter[_Port](), Counter[_Port]()
    for one in classified:
        sender, receiver = (one.pull.source, True), (one.pull.target, False)
        if one.slow:
            slow.update((sender, receiver))
        elif not one.pull.is_open:
            # Fast for that port only: the other one may have been waiting for it.
            fast.update([sender] if one.sent is _Pace.FAST else [])
            fast.update([receiver] if one.received is _Pace.FAST else [])
    slow_ports: defaultdict[int, list[_Port]] = defaultdict(list)
    for port, count in slow.items():
        if port[0] not in spared and count >= _MIN_PULLS and count >= _MIN_SLOW_SHARE * (count + fast[port]):
            slow_ports[port[0]].append(port)

    def blame(node: int) -> tuple[int, bool, bool, bool, int]:
        both_ways = not any(
            fast[port] and port not in slow_ports[node] for port in ((node, True), (node, False))
        )
        count = sum(slow[port] for port in slow_ports[node])
        return count, node in suspects, both_ways, (node, True) in slow_ports[node], -node

    return max(slow_ports, key=blame, default=None)
