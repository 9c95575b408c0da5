"""What finished casts showed of the nodes' links: a fold of what the nodes told, bounded. Pure.

A node's rate in a cast is the one at which its blocks came. That is what its own link gives only if those
that it pulled from had them faster; else it tells that the link gives at least so much.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from rdmacast.planners.automatic import usual_links
from registry.cast import CastProgress, CastRecord, CastState, CastStatus

_KEPT_NODES = 8192
_KEPT_PARTS = 16384  # of casts that are not over
_COUNTED_CASTS = 512
_NAMED_CASTS = 8  # what is older hardly counts any more
# Of the latest cast, against all before it.
_WEIGHT = 0.5
# With less of them a rate says more of how a cast begins and ends than of links.
_LEAST_BYTES = 16 << 20
_LEAST_BLOCKS = 8
# A peer that gave less of a node's bytes did not set its pace.
_LEAST_SHARE = 1 / 16
# One that is slower than this part of those that it pulled from was not held back by them.
_SLOWER = 0.8
_DISTURBED = ("damaged", "late", "failed", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """What a node's link gave by the transport that brought most, the latest cast counting most. Not
    `exact`: it may give more. `casts` are numbers of the latest in which it was measured."""

    transport: str
    bytes_per_s: float
    exact: bool
    casts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    transport: str
    bytes_per_s: float
    givers: tuple[str, ...]


class MeasuredLinks:
    """The latest rates by node; `usual_bytes_per_s` is what links are taken for of which nothing is known,
    and `is_told` whether somebody said so."""

    def __init__(self, usual_bytes_per_s: float | None = None) -> None:
        self.is_told = bool(usual_bytes_per_s)
        self.usual_bytes_per_s = usual_bytes_per_s or usual_links().bytes_per_s
        self._nodes: OrderedDict[str, LinkRate] = OrderedDict()
        self._open: dict[str, dict[str, _Part]] = {}
        self._parts = 0
        self._counted: OrderedDict[str, int] = OrderedDict()
        self._casts = 0

    def __repr__(self) -> str:
        return f"<MeasuredLinks {len(self._nodes)} nodes in {self._casts} casts>"

    def of(self, node: str) -> LinkRate | None:
        return self._nodes.get(node)

    def counted(self, cast_id: str) -> bool:
        """Whether the cast is in the rates already."""
        return cast_id in self._counted

    def told(self, progress: CastProgress) -> None:
        """A node's last word, of a cast that may not be over yet."""
        part = _part(progress)
        if part is None or self.counted(progress.cast_id):
            return
        parts = self._open.setdefault(progress.cast_id, {})
        self._parts += progress.node not in parts
        parts[progress.node] = part
        while self._parts > _KEPT_PARTS:
            self._parts -= len(self._open.pop(next(iter(self._open))))

    def heard(self, status: CastStatus) -> None:
        """What all nodes told of a cast, which counts if it is over."""
        last = {one.node: one for one in status.progress if one.is_final}
        if all(member.node in last for member in status.record.targets):
            for progress in last.values():
                self.told(progress)
            self.over(status.record)

    def over(self, record: CastRecord) -> None:
        """Count what was told of the cast, which has ended; once, whatever is told later."""
        parts = self._open.pop(record.cast_id, {})
        self._parts -= len(parts)
        if not parts or self.counted(record.cast_id):
            return
        self._casts += 1
        self._counted[record.cast_id] = self._casts
        if len(self._counted) > _COUNTED_CASTS:
            self._counted.popitem(last=False)
        sources = {record.members[index].node for index in record.sources}
        for node, part in parts.items():
            fast = [giver in sources or _slower(part, parts.get(giver)) for giver in part.givers]
            self._count(node, part, exact=all(fast))

    def _count(self, node: str, part: _Part, *, exact: bool) -> None:
        known = self._nodes.pop(node, None)
        rate = part.bytes_per_s
        casts: tuple[int, ...] = (self._casts,)
        if known is not None and known.transport == part.transport:
            casts = (*known.casts[1 - _NAMED_CASTS :], self._casts)
            if exact or rate > known.bytes_per_s:
                rate = known.bytes_per_s + _WEIGHT * (rate - known.bytes_per_s)
            else:
                rate = known.bytes_per_s
            exact = exact or known.exact
        self._nodes[node] = LinkRate(transport=part.transport, bytes_per_s=rate, exact=exact, casts=casts)
        if len(self._nodes) > _KEPT_NODES:
            self._nodes.popitem(last=False)


def _slower(part: _Part, giver: _Part | None) -> bool:
    return giver is not None and part.bytes_per_s < _SLOWER * giver.bytes_per_s


def _part(progress: CastProgress) -> _Part | None:
    """The rate of a part that was not disturbed; None where it tells nothing of links."""
    nbytes = sum(progress.received.values())
    if progress.state is not CastState.COMPLETE or any(progress.faults.get(kind) for kind in _DISTURBED):
        return None
    if nbytes < _LEAST_BYTES or progress.blocks < _LEAST_BLOCKS or not progress.span_s > 0:
        return None
    # The first block came before the span.
    came = nbytes * (progress.blocks - 1) / progress.blocks
    return _Part(
        transport=_most(progress.received),
        bytes_per_s=came / progress.span_s,
        givers=tuple(peer for peer, given in progress.pulled.items() if given >= nbytes * _LEAST_SHARE),
    )


def _most(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda name: counts[name])
