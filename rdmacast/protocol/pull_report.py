"""What nodes of a cast tell of their pulls, and the answer: who is slow. Both bounded, little-endian (pure).

A report: version, length of the cast's name, number of slow nodes, of ended pulls, of pulls under way,
node, plan, what a block takes, clock; then the name, the slow nodes, the ended pulls and
those under way. A verdict: version, number of slow nodes, plan; then these nodes.
"""

from dataclasses import dataclass
from struct import Struct, error, unpack_from

from rdmacast.errors import ProtocolError

VERSION = 2
MAX_NODES = 1 << 16
MOST_PLANS = 3  # of a cast besides its first: noise must not keep its nodes planning
MOST_SLOW = 256
MOST_ENDED = 8
MOST_OPEN = 16
MAX_CAST_BYTES = 128
_REPORT = Struct("<BBHBBIIIQ")
_VERDICT = Struct("<BxHI")
_PULL = Struct("<IQI")
_NODE_BYTES = 4
_MOST_US = (1 << 32) - 1
LEAST_REPORT_BYTES = _REPORT.size + 1
MOST_REPORT_BYTES = (
    _REPORT.size + MAX_CAST_BYTES + _NODE_BYTES * MOST_SLOW + _PULL.size * (MOST_ENDED + MOST_OPEN)
)
LEAST_VERDICT_BYTES = _VERDICT.size
MOST_VERDICT_BYTES = _VERDICT.size + _NODE_BYTES * MOST_SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPull:
    """A pull of one block from `source`, in microseconds of the clock of the node that pulled it."""

    source: int
    began_us: int
    lasted_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """`ended` are the latest pulls that brought their block, `under_way` those that last so long already.

    `plan` is the number of the plan that the node goes by, `slow` are the nodes at its edge, and
    `clock_us` is the node's clock as it says this. Nodes are numbers in the cast. `block_us` is
    what a block takes by what was measured of the links, 0 where nobody knows.
    """

    cast: str
    node: int
    plan: int
    slow: tuple[int, ...] = ()
    block_us: int = 0
    clock_us: int = 0
    ended: tuple[TimedPull, ...] = ()
    under_way: tuple[TimedPull, ...] = ()

    def encode(self) -> bytes:
        """Raises ProtocolError where it breaks a bound."""
        name = self.cast.encode()
        _check(name, self.slow, self.ended, self.under_way)
        counts = (len(self.slow), len(self.ended), len(self.under_way))
        block_us = min(self.block_us, _MOST_US)
        head = _REPORT.pack(VERSION, len(name), *counts, self.node, self.plan, block_us, self.clock_us)
        pulls = (
            _PULL.pack(pull.source, pull.began_us, min(pull.lasted_us, _MOST_US))
            for pull in (*self.ended, *self.under_way)
        )
        return b"".join((head, name, _packed(self.slow), *pulls))

    @staticmethod
    def decode(data: bytes) -> "PullReport":
        """Raises ProtocolError."""
        try:
            version, named, slow, ended, under_way, *numbers = _REPORT.unpack_from(data)
        except error:
            raise ProtocolError("a report of pulls is cut off") from None
        _check_version(version)
        node, plan, block_us, clock_us = numbers
        at = _REPORT.size + named
        first = at + slow * _NODE_BYTES
        if len(data) != first + (ended + under_way) * _PULL.size:
            raise ProtocolError(f"a report of pulls in {len(data)} bytes")
        pulls = tuple(
            TimedPull(source=_node(source), began_us=began_us, lasted_us=lasted_us)
            for source, began_us, lasted_us in _PULL.iter_unpack(data[first:])
        )
        name = data[_REPORT.size : at]
        nodes = _unpacked(data, at, slow)
        _check(name, nodes, pulls[:ended], pulls[ended:])
        return PullReport(
            cast=name.decode("ascii"),
            node=_node(node),
            plan=_plan(plan),
            slow=nodes,
            block_us=block_us,
            clock_us=clock_us,
            ended=pulls[:ended],
            under_way=pulls[ended:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The nodes that the plan of that number leaves at its edge; one of a lower number is out of date."""

    plan: int
    slow: tuple[int, ...]

    def encode(self) -> bytes:
        """Raises ProtocolError where it breaks a bound."""
        _check_slow(self.slow)
        return _VERDICT.pack(VERSION, len(self.slow), self.plan) + _packed(self.slow)

    @staticmethod
    def decode(data: bytes) -> "Verdict":
        """Raises ProtocolError."""
        try:
            version, slow, plan = _VERDICT.unpack_from(data)
        except error:
            raise ProtocolError("a verdict on slow nodes is cut off") from None
        _check_version(version)
        if len(data) != _VERDICT.size + slow * _NODE_BYTES:
            raise ProtocolError(f"a verdict on {slow} nodes in {len(data)} bytes")
        nodes = _unpacked(data, _VERDICT.size, slow)
        _check_slow(nodes)
        return Verdict(plan=_plan(plan), slow=nodes)


def _packed(nodes: tuple[int, ...]) -> bytes:
    return b"".join(node.to_bytes(_NODE_BYTES, "little") for node in nodes)


def _unpacked(data: bytes, at: int, count: int) -> tuple[int, ...]:
    return tuple(map(_node, unpack_from(f"<{count}I", data, at)))


def _node(node: int) -> int:
    if node >= MAX_NODES:
        raise ProtocolError(f"a cast has no node {node}")
    return node


def _plan(plan: int) -> int:
    if plan > MOST_PLANS:
        raise ProtocolError(f"plan {plan} of a cast; at most {MOST_PLANS} are made")
    return plan


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ProtocolError(f"a word about slow nodes of version {version}, not {VERSION}")


def _check_slow(slow: tuple[int, ...]) -> None:
    if len(slow) > MOST_SLOW:
        raise ProtocolError(f"{len(slow)} slow nodes; at most {MOST_SLOW} may be told of")


def _check(
    name: bytes, slow: tuple[int, ...], ended: tuple[TimedPull, ...], under_way: tuple[TimedPull, ...]
) -> None:
    if not 1 <= len(name) <= MAX_CAST_BYTES or not name.isascii() or not name.decode().isprintable():
        raise ProtocolError(f"bad name of a cast: use 1 to {MAX_CAST_BYTES} printable ASCII characters")
    _check_slow(slow)
    if len(ended) > MOST_ENDED or len(under_way) > MOST_OPEN:
        raise ProtocolError(f"a report of {len(ended)} pulls and {len(under_way)} under way")
