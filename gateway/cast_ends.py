"""When the casts end that this gateway heard of: a fold of the feed, bounded. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from registry.cast import CastProgress, CastRecord, CastState

_KEPT = 256
_WORST_FIRST = (CastState.FAILED, CastState.CANCELLED, CastState.COMPLETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastEnd:
    """The last target of a cast is done. `seconds` are from when it was heard of; `state` is the worst
    that a target came to: failed, cancelled, complete."""

    record: CastRecord
    seconds: float
    state: CastState


class _Heard:
    """A cast, the targets that it waits for, and what others came to."""

    def __init__(self, record: CastRecord, began_s: float) -> None:
        self.record = record
        self.began_s = began_s
        self.states: dict[str, CastState] = {}
        self.told = False
        self.waits_for = {member.node for member in record.targets}
        # Of those that came back, by which epoch: an earlier part's last word may be heard once more.
        self.since: dict[str, int] = {}

    def join(self, record: CastRecord) -> None:
        """Take its next epoch: who came back, as another process or once more, is not over any more."""
        before = set(self.record.members)
        for member in record.members:
            if member in before or self.states.get(member.node) in (None, CastState.COMPLETE):
                continue
            del self.states[member.node]
            self.since[member.node] = member.epoch
        self.record = record
        self.waits_for = {member.node for member in record.targets} - self.states.keys()

    @property
    def worst(self) -> CastState:
        reached = {self.states[member.node] for member in self.record.targets}
        return next(one for one in _WORST_FIRST if one in reached)


class CastEnds:
    """Each cast that was heard of from its begin ends once, however many nodes join it later.

    `now` is the caller's monotonic clock.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._on_end: list[Callable[[CastEnd], None]] = []

    def __repr__(self) -> str:
        running = [cast_id for cast_id, heard in self._heard.items() if not heard.told]
        return f"<CastEnds running={running}>"

    def each(self, callback: Callable[[CastEnd], None]) -> None:
        """Call it with each cast that ends while the feed is followed."""
        self._on_end.append(callback)

    def awaited(self, cast_id: str) -> frozenset[str]:
        """Nodes whose part is not over; nobody's of a cast that was not heard of from its begin."""
        heard = self._heard.get(cast_id)
        return frozenset() if heard is None else frozenset(heard.waits_for)

    @property
    def running(self) -> list[str]:
        """The ids of casts whose end is awaited."""
        return [cast_id for cast_id, heard in self._heard.items() if heard.waits_for]

    def missed(self, records: Iterable[CastRecord]) -> None:
        """The feed was not followed for a while, and this is how the casts are by now."""
        for record in records:
            known = self._heard.get(record.cast_id)
            if known is not None and record.epoch > known.record.epoch:
                known.join(record)

    def changed(self, record: CastRecord, now: float) -> None:
        """A cast was planned, or nodes joined it."""
        known = self._heard.get(record.cast_id)
        if known is None:
            self._heard[record.cast_id] = _Heard(record, now)
            if len(self._heard) > _KEPT:
                del self._heard[next(iter(self._heard))]
        elif record.epoch > known.record.epoch:
            known.join(record)

    def ended(self, progress: CastProgress, now: float) -> None:
        """A node's part is over."""
        known = self._heard.get(progress.cast_id)
        if known is not None and progress.epoch >= known.since.get(progress.node, 0):
            self._note(known, progress.node, progress.state, now)

    def lost(self, node: str, now: float) -> None:
        """A node is gone, and with it its part in all casts."""
        for heard in self._heard.values():
            if node in heard.waits_for:
                self._note(heard, node, CastState.FAILED, now)

    def _note(self, heard: _Heard, node: str, state: CastState, now: float) -> None:
        heard.states[node] = state
        heard.waits_for.discard(node)
        if heard.told or heard.waits_for:
            return
        heard.told = True
        end = CastEnd(record=heard.record, seconds=now - heard.began_s, state=heard.worst)
        for callback in self._on_end:
            callback(end)
