"""Which nodes of a cast are slow by what their pulls took, and plans that leave them at its edge (pure).

A pull is held back by the port of its source or by that of its target: one of both is busy with it, or
with others beside it. So where neither port carried half of what is usual while a pull lasted, one of the
two nodes is slow by itself. Which one, the other pulls of both tell.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rdmacast.plan import CastShape
from rdmacast.planners.own_part import Order, own_part

SLOW = 2.0  # under half of what is usual
_LEAST_PULLS = 3
_LEAST_TO_RATE = 2
_LEAST_SHARE = 0.75
_AFTER_RESTS = 2 / 3
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
    def seconds(self) -> float:
        return max(self.ended_s - self.began_s, 1e-6)


def slow_nodes(pulls: Sequence[Pulled]) -> frozenset[int]:
    """Nodes most of whose pulls were slow, though not because of another slow node.

    Who has most slow pulls is blamed first, and what it took part in tells nothing of the others.
    """
    ports = _by_port(pulls)
    usual = _usual([pull for pull in pulls if not pull.open])
    if usual is None:
        return frozenset()
    judged = [_judge(pull, ports, usual) for pull in pulls]
    found: set[int] = set()
    while True:
        blamed = _most_blamed([one for one in judged if not {one.pull.source, one.pull.target} & found])
        if blamed is None:
            return frozenset(found)
        found.add(blamed)


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
    inner = CastShape(nodes=len(fast), sources=sources, blocks=shape.blocks)
    return tuple((fast[source], block) for source, block in own_part(planner, inner, fast.index(node)))


@dataclass(frozen=True, slots=True)
class _Judged:
    """A pull, and whether its source gave and its target took quickly while it lasted."""

    pull: Pulled
    gave: bool
    took: bool

    @property
    def slow(self) -> bool:
        return not self.gave and not self.took


def _by_port(pulls: Iterable[Pulled]) -> Mapping[_Port, list[Pulled]]:
    ports: defaultdict[_Port, list[Pulled]] = defaultdict(list)
    for pull in pulls:
        ports[pull.source, True].append(pull)
        ports[pull.target, False].append(pull)
    return ports


def _usual(ended: Iterable[Pulled]) -> float | None:
    """The median node's rate, in blocks a second, at the better one of its ports; None if few tell."""
    rates: dict[int, float] = {}
    for (node, _), pulls in _by_port(ended).items():
        if len(pulls) >= _LEAST_TO_RATE:
            rates[node] = max(rates.get(node, 0.0), _rate(pulls))
    if len(rates) < _LEAST_NODES:
        return None
    return sorted(rates.values())[len(rates) // 2]


def _rate(pulls: Sequence[Pulled]) -> float:
    """Of a port while it was busy; what comes after a rest may come in a burst, and counts for less."""
    busy_s = _busy_s(pulls)
    span_s = max(pull.ended_s for pull in pulls) - min(pull.began_s for pull in pulls)
    return len(pulls) / busy_s * (_AFTER_RESTS if busy_s < span_s / 2 else 1.0)


def _busy_s(pulls: Iterable[Pulled]) -> float:
    """How long at least one of them was under way."""
    busy_s, until_s = 0.0, float("-inf")
    for pull in sorted(pulls, key=lambda pull: pull.began_s):
        busy_s += max(0.0, pull.ended_s - max(pull.began_s, until_s))
        until_s = max(until_s, pull.ended_s)
    return max(busy_s, 1e-6)


def _judge(pull: Pulled, ports: Mapping[_Port, list[Pulled]], usual: float) -> _Judged:
    gave = _carried(ports[pull.source, True], pull) * SLOW >= usual
    took = _carried(ports[pull.target, False], pull) * SLOW >= usual
    return _Judged(pull, gave, took)


def _carried(pulls: Iterable[Pulled], during: Pulled) -> float:
    """Blocks a second of a port while a pull lasted; one under way counts as half of a block."""
    blocks = 0.0
    for pull in pulls:
        both_s = min(pull.ended_s, during.ended_s) - max(pull.began_s, during.began_s)
        if both_s > 0:
            blocks += both_s / pull.seconds * (0.5 if pull.open else 1.0)
    return blocks / during.seconds


def _most_blamed(judged: Iterable[_Judged]) -> int | None:
    """Who has most slow pulls; of equals who is slow both ways, then who gives slowly."""
    slow, quick = Counter[_Port](), Counter[_Port]()
    for one in judged:
        giver, taker = (one.pull.source, True), (one.pull.target, False)
        if one.slow:
            slow.update((giver, taker))
        elif not one.pull.open:
            # Quick of the port that was: the other one may have been waiting for it.
            quick.update([giver] if one.gave else [])
            quick.update([taker] if one.took else [])
    suspects: defaultdict[int, list[_Port]] = defaultdict(list)
    for port, count in slow.items():
        if count >= _LEAST_PULLS and count >= _LEAST_SHARE * (count + quick[port]):
            suspects[port[0]].append(port)

    def blame(node: int) -> tuple[int, bool, bool, int]:
        both_ways = not any(
            quick[port] and port not in suspects[node] for port in ((node, True), (node, False))
        )
        count = sum(slow[port] for port in suspects[node])
        return count, both_ways, (node, True) in suspects[node], -node

    return max(suspects, key=blame, default=None)
