"""Which nodes of a cast are slow by what their pulls took, and plans that leave them at its edge (pure).

A pull is held back by the port of its source or by that of its target: one of both is busy with it, or
with others beside it. So where neither port carried half of what is usual while a pull lasted, one of the
two nodes is slow by itself. Which one, the other pulls of both tell.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

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
# What buffers and shapers let through at once after a rest. Of blocks twice as large no more than half comes
# so, and twice as quick is not yet slow.
_BURST_BYTES = 512 << 10

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


@dataclass(frozen=True, slots=True)
class Standard:
    """What is known beforehand of the rate by which pulls are judged, in blocks a second.

    No link carries more than `most`, if that is known. Else the pulls must show what links carry, and after
    each rest so many as `burst` blocks show nothing.
    """

    most: float | None = None
    burst: float = 0.0


def standard(block_bytes: int, block_s: float) -> Standard:
    """For blocks of this size, which take a link so long by what was measured of it; 0 for what is not
    known."""
    if block_s > 0:
        return Standard(most=1 / block_s)
    return Standard(burst=_BURST_BYTES / block_bytes if 0 < block_bytes < 2 * _BURST_BYTES else 0.0)


NOTHING_KNOWN = Standard()


def slow_nodes(
    pulls: Sequence[Pulled], suspects: Collection[int] = (), standard: Standard = NOTHING_KNOWN
) -> frozenset[int]:
    """Nodes most of whose pulls were slow, though not because of another slow node.

    Who has most slow pulls is blamed first, of equals one of the `suspects`, and what it took part in tells
    nothing of the others. The one source is never among them: there is no plan around it.
    """
    judged = _judged(pulls, standard)
    found: set[int] = set()
    while True:
        others = [one for one in judged if not {one.pull.source, one.pull.target} & found]
        blamed = _most_blamed(others, suspects)
        if blamed is None:
            sources = _sources(pulls)
            return frozenset(found - sources if len(sources) == 1 else found)
        found.add(blamed)


def beside(
    pulls: Sequence[Pulled], slow: Collection[int], standard: Standard = NOTHING_KNOWN
) -> frozenset[int]:
    """Who gave slowly to these nodes, or took so from them: it may be by them that these seem slow."""
    pairs = [{one.pull.source, one.pull.target} for one in _judged(pulls, standard) if one.slow]
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


def _usual(ended: Iterable[Pulled], standard: Standard) -> float | None:
    """The median node's rate, in blocks a second, at the better one of its ports; None if few tell."""
    rates: dict[int, float] = {}
    ports = _by_port(ended)
    for (node, _), pulls in ports.items():
        rate = _rate(pulls, standard.burst) if len(pulls) >= _LEAST_TO_RATE else 0.0
        if rate:
            rates[node] = max(rates.get(node, 0.0), rate)
    if len(rates) < _LEAST_NODES:
        return None
    usual = sorted(rates.values())[len(rates) // 2]
    return min(rate for rate in (usual, _lasting(ports, standard.burst), standard.most) if rate is not None)


def _lasting(ports: Mapping[_Port, Sequence[Pulled]], burst: float) -> float | None:
    """The best rate of a port that did not rest, which no buffer makes look better than it is; None if all
    such have a node in common, which may be slow itself."""
    rates: list[tuple[float, set[int]]] = []
    for pulls in ports.values():
        for run in _runs(pulls):
            if len(run) >= _LEAST_PULLS and len(run) > burst:
                nodes = {node for one in run for node in (one.source, one.target)}
                rates.append(((len(run) - burst) / _lasted_s(run), nodes))
    if not rates or set.intersection(*(nodes for _, nodes in rates)):
        return None
    return max(rate for rate, _ in rates)


def _rate(pulls: Sequence[Pulled], burst: float) -> float:
    """Of a port, in blocks a second, while it was busy; 0 where all may have come at once."""
    runs = _runs(pulls)
    rests_s = (later[0].began_s - max(one.until_s for one in run) for run, later in pairwise(runs))
    busy_s = sum(map(_lasted_s, runs)) + sum(min(_BURST_S, rest_s) for rest_s in rests_s)
    return sum(max(0.0, len(run) - burst) for run in runs) / busy_s


def _runs(pulls: Iterable[Pulled]) -> list[list[Pulled]]:
    """Of a port: what it carried without a rest."""
    runs, until_s = list[list[Pulled]](), float("-inf")
    for pull in sorted(pulls, key=lambda pull: pull.began_s):
        if pull.began_s > until_s + _TICK_S:
            runs.append([])
        runs[-1].append(pull)
        until_s = max(until_s, pull.until_s)
    return runs


def _lasted_s(run: Sequence[Pulled]) -> float:
    return max(one.until_s for one in run) - run[0].began_s


def _judged(pulls: Sequence[Pulled], standard: Standard) -> list[_Judged]:
    """None where too little is known of what is usual, or where no pull can be slow."""
    usual = _usual([pull for pull in pulls if not pull.open], standard)
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


def _most_blamed(judged: Iterable[_Judged], suspects: Collection[int]) -> int | None:
    """Who has most slow pulls; of equals a suspect, then who is slow both ways, then who gives slowly."""
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
        if count >= _LEAST_PULLS and count >= _LEAST_SHARE * (count + quick[port]):
            slow_ports[port[0]].append(port)

    def blame(node: int) -> tuple[int, bool, bool, bool, int]:
        both_ways = not any(
            quick[port] and port not in slow_ports[node] for port in ((node, True), (node, False))
        )
        count = sum(slow[port] for port in slow_ports[node])
        return count, node in suspects, both_ways, (node, True) in slow_ports[node], -node

    return max(slow_ports, key=blame, default=None)
