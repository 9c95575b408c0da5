"""Which nodes of a cast are slow by what their pulls took, and plans that leave them at its edge (pure).

A pull is held back by the port of its source or by that of its target: one of both is busy with it, or
with others beside it. So where neither port carried half of what is usual while a pull lasted, one of the
two nodes is slow by itself. Which one, the other pulls of both tell.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rdmacast.plan import CastShape
from rdmacast.planners.own_part import Order, own_part

SLOW = 2.0  # under half of what is usual
_LEAST_PULLS = 3
_LEAST_TO_RATE = 2
_LEAST_SHARE = 0.75
# Of a rest, so much counts as busy: what comes after it may have lain in a buffer, or be let through by a
# shaper that the rest filled. Else a port that gives at once what comes to it now and then looks quick.
_BURST_S = 0.01
_LONG_REST_S = 1.0  # what comes after a rest tells of the rest as well: only the rate of both is the port's
_TICK_S = 1e-3  # of the clocks that pulls are timed by
_OPEN = 0.5  # of a block: what counts of one under way
_LEAST_NODES = 3  # of two nobody can say which is usual

_Port = tuple[int, bool]  # a node, and whether it gives


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull of one block, by the clock of who looks; `open` if it is still under way at `ended_s`."""

    source: int
    target: int
    began_s: float
    ended_s: float
    open: bool = False

    @property
    def until_s(self) -> float:
        """When it ended, or a tick after it began."""
        return max(self.ended_s, self.began_s + _TICK_S)

    @property
    def seconds(self) -> float:
        return self.until_s - self.began_s


def slow_nodes(
    pulls: Sequence[Pulled], suspects: Collection[int] = (), most: float | None = None
) -> frozenset[int]:
    """Nodes most of whose pulls were slow, though not because of another slow node.

    Who has most slow pulls is blamed first, of equals one of the `suspects`, and what it took part in tells
    nothing of the others. The one source is never among them, since there is no plan around it, and is blamed
    for another's slow pulls only if it is suspected. `most` blocks a second are what links were measured to
    carry: what came quicker, out of a buffer, is not usual. None: nobody knows.
    """
    judged, sources = _judged(pulls, most), _sources(pulls)
    unavoidable = sources if len(sources) == 1 else set[int]()
    found: set[int] = set()
    while True:
        others = [one for one in judged if not {one.pull.source, one.pull.target} & found]
        blamed = _most_blamed(others, suspects, unavoidable - set(suspects))
        if blamed is None:
            return frozenset(found - unavoidable)
        found.add(blamed)


def beside(pulls: Sequence[Pulled], slow: Collection[int], most: float | None = None) -> frozenset[int]:
    """Who gave slowly to these nodes, or took so from them: it may be by them that these seem slow."""
    pairs = [{one.pull.source, one.pull.target} for one in _judged(pulls, most) if one.slow]
    return frozenset().union(*(pair for pair in pairs if pair & set(slow))) - set(slow)


def order_around(planner: str, shape: CastShape, slow: Collection[int], node: int) -> Order | None:
    """What the node is to pull from whom, in order: the planner's scheme over the others, from which the
    slow ones take turns. Where all sources are slow they give nevertheless; None where all targets are."""
    slow = set(slow)
    if slow.issuperset(shape.sources):
        slow -= set(shape.sources)
    fast = [member for member in range(shape.nodes) if member not in slow]
    sources = tuple(index for index, member in enumerate(fast) if member in shape.sources)
    if len(sources) == len(fast):
        return None
    if node in slow:
        turn = sorted(slow).index(node)
        return tuple((fast[(block + turn) % len(fast)], block) for block in range(shape.blocks))
    inner = replace(shape, nodes=len(fast), sources=sources)
    return tuple((fast[source], block) for source, block in own_part(planner, inner, fast.index(node)))


class _Pace(Enum):
    SLOW = "slow"
    BURST = "burst"  # quick after a rest, which tells nothing
    QUICK = "quick"


@dataclass(frozen=True, slots=True)
class _Judged:
    """A pull, and how quickly its source gave and its target took while it lasted."""

    pull: Pulled
    gave: "_Pace"
    took: "_Pace"

    @property
    def slow(self) -> bool:
        return self.gave is self.took is _Pace.SLOW


def _by_port(pulls: Iterable[Pulled]) -> Mapping[_Port, list[Pulled]]:
    ports: defaultdict[_Port, list[Pulled]] = defaultdict(list)
    for pull in pulls:
        ports[pull.source, True].append(pull)
        ports[pull.target, False].append(pull)
    return ports


def _sources(pulls: Iterable[Pulled]) -> set[int]:
    """Who gives and takes nothing."""
    return {pull.source for pull in pulls} - {pull.target for pull in pulls}


def _usual(ended: Iterable[Pulled], most: float | None) -> float | None:
    """The median node's rate, in blocks a second, at the better one of its ports; None if few tell."""
    rates: dict[int, float] = {}
    ports = _by_port(ended)
    for (node, _), pulls in ports.items():
        if len(pulls) >= _LEAST_TO_RATE:
            rates[node] = max(rates.get(node, 0.0), _rate(pulls))
    if len(rates) < _LEAST_NODES:
        return None
    usual = sorted(rates.values())[len(rates) // 2]
    return min(rate for rate in (usual, _lasting(ports), most) if rate is not None)


def _lasting(ports: Mapping[_Port, Sequence[Pulled]]) -> float | None:
    """The best rate of a port that did not rest, which no buffer makes look better than it is; None if all
    such have a node in common, which may be slow itself."""
    rates: list[tuple[float, set[int]]] = []
    for pulls in ports.values():
        run: list[Pulled] = []
        for pull in sorted(pulls, key=lambda pull: pull.began_s):
            if run and pull.began_s > max(one.until_s for one in run) + _TICK_S:
                run = []
            run.append(pull)
            first, last = run[0].until_s, max(one.until_s for one in run)
            if len(run) >= _LEAST_PULLS and last > first:
                nodes = {node for one in run for node in (one.source, one.target)}
                rates.append(((len(run) - 1) / (last - first), nodes))
    if not rates or set.intersection(*(nodes for _, nodes in rates)):
        return None
    return max(rate for rate, _ in rates)


def _rate(pulls: Sequence[Pulled]) -> float:
    """Of a port, in blocks a second, while it was busy."""
    return len(pulls) / _busy_s(pulls)


def _busy_s(pulls: Sequence[Pulled]) -> float:
    """How long at least one of them was under way, and the beginnings of the rests between them."""
    busy_s, until_s = 0.0, min(pull.began_s for pull in pulls)
    for pull in sorted(pulls, key=lambda pull: pull.began_s):
        busy_s += min(_BURST_S, max(0.0, pull.began_s - until_s))
        busy_s += max(0.0, pull.until_s - max(pull.began_s, until_s))
        until_s = max(until_s, pull.until_s)
    return busy_s


def _judged(pulls: Sequence[Pulled], most: float | None) -> list[_Judged]:
    """None where too little is known of what is usual, or where no pull can be slow."""
    usual = _usual([pull for pull in pulls if not pull.open], most)
    if usual is None:
        return []
    # A port carried at least the pull itself while it lasted, so that no quick one is slow. Mostly all are.
    if not any(usual * pull.seconds > SLOW * (_OPEN if pull.open else 1.0) for pull in pulls):
        return []
    ports = _by_port(pulls)
    return [_judge(pull, ports, usual) for pull in pulls]


def _judge(pull: Pulled, ports: Mapping[_Port, list[Pulled]], usual: float) -> _Judged:
    gave = _pace(ports[pull.source, True], pull, usual)
    return _Judged(pull, gave, _pace(ports[pull.target, False], pull, usual))


def _pace(pulls: Iterable[Pulled], during: Pulled, usual: float) -> _Pace:
    """Of a port while a pull lasted."""
    blocks, rested_s = 0.0, _LONG_REST_S
    for pull in pulls:
        both_s = min(pull.until_s, during.until_s) - max(pull.began_s, during.began_s)
        if both_s > 0:
            blocks += both_s / pull.seconds * (_OPEN if pull.open else 1.0)
        if pull.began_s < during.began_s:
            rested_s = min(rested_s, max(0.0, during.began_s - pull.until_s))
    if blocks * SLOW < usual * during.seconds:
        return _Pace.SLOW
    return _Pace.BURST if blocks * SLOW < usual * (during.seconds + rested_s) else _Pace.QUICK


def _most_blamed(judged: Iterable[_Judged], suspects: Collection[int], spared: Collection[int]) -> int | None:
    """Who has most slow pulls, besides those that are spared; of equals a suspect, then who is slow both
    ways, then who gives slowly."""
    slow, quick = Counter[_Port](), Counter[_Port]()
    for one in judged:
        giver, taker = (one.pull.source, True), (one.pull.target, False)
        if one.slow:
            slow.update((giver, taker))
        elif not one.pull.open:
            # Quick of the port that was: the other one may have been waiting for it.
            quick.update([giver] if one.gave is _Pace.QUICK else [])
            quick.update([taker] if one.took is _Pace.QUICK else [])
    slow_ports: defaultdict[int, list[_Port]] = defaultdict(list)
    for port, count in slow.items():
        if port[0] not in spared and count >= _LEAST_PULLS and count >= _LEAST_SHARE * (count + quick[port]):
            slow_ports[port[0]].append(port)

    def blame(node: int) -> tuple[int, bool, bool, bool, int]:
        both_ways = not any(
            quick[port] and port not in slow_ports[node] for port in ((node, True), (node, False))
        )
        count = sum(slow[port] for port in slow_ports[node])
        return count, node in suspects, both_ways, (node, True) in slow_ports[node], -node

    return max(slow_ports, key=blame, default=None)
