"""Link rates of nodes measured by finished casts: a bounded fold of the nodes' final progress. Pure.

A node's rate in a cast is the rate at which its blocks arrived. It is the rate of the node's own link only if
the peers that it pulled from had the blocks faster; otherwise it is a lower bound.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

from rdmacast.link_rate import LinkRate
from registry.records.cast import CastProgress, CastRecord, CastState, CastStatus

_MAX_NODES = 8192
_MAX_PARTS = 16384  # of casts that are not over
_MAX_CASTS = 512
_MAX_RATE_CASTS = 8  # older casts have almost no weight
# Below these a rate depends more on how a cast starts and ends than on links.
_MIN_BYTES = 16 << 20
_MIN_BLOCKS = 8
# A peer that sent a smaller share of a node's bytes did not limit its rate.
_MIN_SHARE = 1 / 16
# A node slower than this share of its sources was not limited by them.
_SLOWER_SHARE = 0.8
_DISTURBED = ("damaged", "late", "failed", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinkRate:
    """The measured rate of a node's link over its main transport, the latest cast weighing most.

    Not `exact`: a lower bound. `casts` are the numbers of the latest casts that measured it.
    """

    transport: str
    rate: LinkRate = field(default_factory=LinkRate)
    exact: bool = False
    casts: tuple[int, ...] = ()

    @property
    def bytes_per_s(self) -> float:
        return self.rate.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartRate:
    transport: str
    bytes_per_s: float
    sources: tuple[str, ...]


class LinkRateCache:
    """A cache of the measured link rates by node.

    `configured_bytes_per_s` is what the operator set as the rate of links without a measurement, if anything.
    """

    def __init__(self, configured_bytes_per_s: float | None = None) -> None:
        self.configured_bytes_per_s = configured_bytes_per_s
        self._nodes: OrderedDict[str, MeasuredLinkRate] = OrderedDict()
        self._open: dict[str, dict[str, _PartRate]] = {}
        self._parts = 0
        self._counted: OrderedDict[str, int] = OrderedDict()
        self._casts = 0

    def __repr__(self) -> str:
        return f"<LinkRateCache {len(self._nodes)} nodes in {self._casts} casts>"

    def get(self, node: str) -> MeasuredLinkRate | None:
        return self._nodes.get(node)

    def usual_bytes_per_s(self) -> float:
        """Return the median of the measured rates; without any the configured or the assumed rate."""
        if self._nodes:
            return median_low(one.bytes_per_s for one in self._nodes.values())
        return self.configured_bytes_per_s or LinkRate().bytes_per_s

    def is_counted(self, cast_id: str) -> bool:
        """Return whether the rates include the cast."""
        return cast_id in self._counted

    def on_part_ended(self, progress: CastProgress) -> None:
        """Apply the final progress of a node in a cast that may still be running."""
        part = _part(progress)
        if part is None or self.is_counted(progress.cast_id):
            return
        parts = self._open.setdefault(progress.cast_id, {})
        self._parts += progress.node not in parts
        parts[progress.node] = part
        while self._parts > _MAX_PARTS:
            self._parts -= len(self._open.pop(next(iter(self._open))))

    def on_status(self, status: CastStatus) -> None:
        """Apply the progress of all nodes of a cast; it counts if the cast has ended."""
        last = {one.node: one for one in status.progress if one.is_final}
        if all(member.node in last for member in status.record.targets):
            for progress in last.values():
                self.on_part_ended(progress)
            self.on_cast_ended(status.record)

    def on_cast_ended(self, record: CastRecord) -> None:
        """Count the parts of a cast that has ended, once; later reports are ignored."""
        parts = self._open.pop(record.cast_id, {})
        self._parts -= len(parts)
        if not parts or self.is_counted(record.cast_id):
            return
        self._casts += 1
        self._counted[record.cast_id] = self._casts
        if len(self._counted) > _MAX_CASTS:
            self._counted.popitem(last=False)
        cast_sources = {record.members[index].node for index in record.sources}
        for node, part in parts.items():
            fast = [source in cast_sources or _is_slower(part, parts.get(source)) for source in part.sources]
            self._count(node, part, exact=all(fast))

    def _count(self, node: str, part: _PartRate, *, exact: bool) -> None:
        known = self._nodes.pop(node, None)
        if known is None or known.transport != part.transport:
            known = MeasuredLinkRate(transport=part.transport)
        rate = known.rate
        if exact or not rate.samples or part.bytes_per_s > rate.bytes_per_s:
            rate = rate.observe(part.bytes_per_s)
        self._nodes[node] = MeasuredLinkRate(
            transport=part.transport,
            rate=rate,
            exact=exact or known.exact,
            casts=(*known.casts[1 - _MAX_RATE_CASTS :], self._casts),
        )
        if len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)


def _is_slower(part: _PartRate, source: _PartRate | None) -> bool:
    return source is not None and part.bytes_per_s < _SLOWER_SHARE * source.bytes_per_s


def _part(progress: CastProgress) -> _PartRate | None:
    """Return the rate of an undisturbed part, None where it does not show the rate of links."""
    nbytes = sum(progress.received.values())
    if progress.state is not CastState.COMPLETE or any(progress.faults.get(kind) for kind in _DISTURBED):
        return None
    if nbytes < _MIN_BYTES or progress.blocks < _MIN_BLOCKS or not progress.span_s > 0:
        return None
    # The first block arrived before the span.
    arrived = nbytes * (progress.blocks - 1) / progress.blocks
    return _PartRate(
        transport=_most(progress.received),
        bytes_per_s=arrived / progress.span_s,
        sources=tuple(peer for peer, given in progress.pulled.items() if given >= nbytes * _MIN_SHARE),
    )


def _most(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda name: counts[name])
