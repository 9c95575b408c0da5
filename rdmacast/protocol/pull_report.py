"""Reports of pulls in a cast, and the verdict on slow nodes. Both bounded, little-endian (pure).

A report: version, length of the cast's name, number of slow nodes, of ended pulls, of pending pulls, node,
plan, duration of a block, clock; then the name, the slow nodes, the ended pulls and the pending ones. A
verdict: version, number of slow nodes, plan; then these nodes.
"""

from dataclasses import dataclass
from struct import Struct, error, unpack_from

from rdmacast.errors import ProtocolError

VERSION = 2
MAX_NODES = 1 << 16
MAX_PLANS = 3  # of a cast besides its first: noise must not keep its nodes planning
MAX_SLOW = 256
MAX_ENDED = 8
MAX_OPEN = 16
MAX_CAST_BYTES = 128
_REPORT = Struct("<BBHBBIIIQ")
_VERDICT = Struct("<BxHI")
_PULL = Struct("<IQI")
_NODE_BYTES = 4
_MAX_US = (1 << 32) - 1
MIN_REPORT_BYTES = _REPORT.size + 1
MAX_REPORT_BYTES = (
    _REPORT.size + MAX_CAST_BYTES + _NODE_BYTES * MAX_SLOW + _PULL.size * (MAX_ENDED + MAX_OPEN)
)
MIN_VERDICT_BYTES = _VERDICT.size
MAX_VERDICT_BYTES = _VERDICT.size + _NODE_BYTES * MAX_SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPull:
    """A pull of one block from `source`, in microseconds of the clock of the node that pulled it."""

    source: int
    started_us: int
    duration_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """The report of one node's pulls; nodes are numbers in the cast.

    `ended` are the latest pulls that brought their block, `pending` the pending ones with their age.
    `plan` is the number of the plan that the node follows, `slow` are the nodes at its edge, `clock_us` is
    the node's clock at the report, and `block_us` the duration of a block at the measured link rate, 0 if
    unknown.
    """

    cast: str
    node: int
    plan: int
    slow: tuple[int, ...] = ()
    block_us: int = 0
    clock_us: int = 0
    ended: tuple[TimedPull, ...] = ()
    pending: tuple[TimedPull, ...] = ()

    def encode(self) -> bytes:
        """Return the report or verdict in bytes. Raises ProtocolError if it breaks a bound."""
        name = self.cast.encode()
        _check(name, self.slow, self.ended, self.pending)
        counts = (len(self.slow), len(self.ended), len(self.pending))
        block_us = min(self.block_us, _MAX_US)
        head = _REPORT.pack(VERSION, len(name), *counts, self.node, self.plan, block_us, self.clock_us)
        pulls = (
            _PULL.pack(pull.source, pull.started_us, min(pull.duration_us, _MAX_US))
            for pull in (*self.ended, *self.pending)
        )
        return b"".join((head, name, _packed(self.slow), *pulls))

    @staticmethod
    def decode(data: bytes) -> "PullReport":
        """Read what `encode` returned. Raises ProtocolError."""
        try:
            version, named, slow, ended, pending, *numbers = _REPORT.unpack_from(data)
        except error:
            raise ProtocolError("a report of pulls is truncated") from None
        _check_version(version)
        node, plan, block_us, clock_us = numbers
        at = _REPORT.size + named
        first = at + slow * _NODE_BYTES
        if len(data) != first + (ended + pending) * _PULL.size:
            raise ProtocolError(f"a report of pulls in {len(data)} bytes")
        pulls = tuple(
            TimedPull(source=_node(source), started_us=started_us, duration_us=duration_us)
            for source, started_us, duration_us in _PULL.iter_unpack(data[first:])
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
            pending=pulls[ended:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerVerdict:
    """The slow nodes that the plan of this number leaves at its edge; a lower number is out of date."""

    plan: int
    slow: tuple[int, ...]

    def encode(self) -> bytes:
        """Return the report or verdict in bytes. Raises ProtocolError if it breaks a bound."""
        _check_slow(self.slow)
        return _VERDICT.pack(VERSION, len(self.slow), self.plan) + _packed(self.slow)

    @staticmethod
    def decode(data: bytes) -> "StragglerVerdict":
        """Read what `encode` returned. Raises ProtocolError."""
        try:
            version, slow, plan = _VERDICT.unpack_from(data)
        except error:
            raise ProtocolError("a verdict on slow nodes is truncated") from None
        _check_version(version)
        if len(data) != _VERDICT.size + slow * _NODE_BYTES:
            raise ProtocolError(f"a verdict on {slow} nodes in {len(data)} bytes")
        nodes = _unpacked(data, _VERDICT.size, slow)
        _check_slow(nodes)
        return StragglerVerdict(plan=_plan(plan), slow=nodes)


def _packed(nodes: tuple[int, ...]) -> bytes:
    return b"".join(node.to_bytes(_NODE_BYTES, "little") for node in nodes)


def _unpacked(data: bytes, at: int, count: int) -> tuple[int, ...]:
    return tuple(map(_node, unpack_from(f"<{count}I", data, at)))


def _node(node: int) -> int:
    if node >= MAX_NODES:
        raise ProtocolError(f"a cast has no node {node}")
    return node


def _plan(plan: int) -> int:
    if plan > MAX_PLANS:
        raise ProtocolError(f"plan {plan} of a cast; at most {MAX_PLANS} are made")
    return plan


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ProtocolError(f"a report of version {version}, not {VERSION}")


def _check_slow(slow: tuple[int, ...]) -> None:
    if len(slow) > MAX_SLOW:
        raise ProtocolError(f"{len(slow)} slow nodes; at most {MAX_SLOW} may be reported")


def _check(
    name: bytes, slow: tuple[int, ...], ended: tuple[TimedPull, ...], pending: tuple[TimedPull, ...]
) -> None:
    if not 1 <= len(name) <= MAX_CAST_BYTES or not name.isascii() or not name.decode().isprintable():
        raise ProtocolError(f"bad name of a cast: use 1 to {MAX_CAST_BYTES} printable ASCII characters")
    _check_slow(slow)
    if len(ended) > MAX_ENDED or len(pending) > MAX_OPEN:
        raise ProtocolError(f"a report of {len(ended)} pulls and {len(pending)} under way")
