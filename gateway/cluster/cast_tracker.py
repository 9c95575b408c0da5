"""A tracker of when casts end: a bounded fold of the change feed. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from registry.records.cast import CastProgress, CastRecord, CastState

_MAX_CASTS = 256
_WORST_FIRST = (CastState.FAILED, CastState.CANCELLED, CastState.COMPLETE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastEnded:
    """The end of a cast, when its last target is done.

    `seconds` count from when the cast was first seen; `state` is the worst final state of a target:
    failed, cancelled, complete.
    """

    record: CastRecord
    seconds: float
    state: CastState


class _TrackedCast:
    """A cast, its pending targets, and the final states of the others."""

    def __init__(self, record: CastRecord, started_s: float) -> None:
        self.record = record
        self.started_s = started_s
        self.states: dict[str, CastState] = {}
        self.ended = False
        self.pending = {member.node for member in record.targets}
        # By node that rejoined, its epoch: a final progress of an earlier part may arrive again.
        self.since: dict[str, int] = {}

    def join(self, record: CastRecord) -> None:
        """Apply the next epoch; a node that rejoined, as a new process or again, is pending again."""
        before = set(self.record.members)
        for member in record.members:
            if member in before or self.states.get(member.node) in (None, CastState.COMPLETE):
                continue
            del self.states[member.node]
            self.since[member.node] = member.epoch
        self.record = record
        self.pending = {member.node for member in record.targets} - self.states.keys()

    @property
    def worst(self) -> CastState:
        reached = {self.states[member.node] for member in self.record.targets}
        return next(one for one in _WORST_FIRST if one in reached)


class CastTracker:
    """A tracker that reports the end of each cast followed from its start, once, even if nodes join later.

    `now` is the caller's monotonic clock.
    """

    def __init__(self) -> None:
        self._casts: dict[str, _TrackedCast] = {}
        self._on_end: list[Callable[[CastEnded], None]] = []

    def __repr__(self) -> str:
        running = [cast_id for cast_id, cast in self._casts.items() if not cast.ended]
        return f"<CastTracker running={running}>"

    def subscribe(self, callback: Callable[[CastEnded], None]) -> None:
        """Call `callback` with each cast that ends while the feed is followed."""
        self._on_end.append(callback)

    def pending_nodes(self, cast_id: str) -> frozenset[str]:
        """Return the nodes whose part is not over; none for a cast that was not followed from its start."""
        cast = self._casts.get(cast_id)
        return frozenset() if cast is None else frozenset(cast.pending)

    def ended_parts(self, cast_id: str) -> Mapping[str, CastState]:
        """Return the nodes whose part is over, with how; none for a cast that was not followed."""
        cast = self._casts.get(cast_id)
        return {} if cast is None else cast.states

    @property
    def running(self) -> list[str]:
        """Ids of casts with pending nodes."""
        return [cast_id for cast_id, cast in self._casts.items() if cast.pending]

    def resync(self, records: Iterable[CastRecord]) -> None:
        """Apply the current records of casts after an interruption of the feed."""
        for record in records:
            cast = self._casts.get(record.cast_id)
            if cast is not None and record.epoch > cast.record.epoch:
                cast.join(record)

    def on_cast(self, record: CastRecord, now: float) -> None:
        """Apply a new cast, or one that nodes joined."""
        cast = self._casts.get(record.cast_id)
        if cast is None:
            self._casts[record.cast_id] = _TrackedCast(record, now)
            if len(self._casts) > _MAX_CASTS:
                del self._casts[next(iter(self._casts))]
        elif record.epoch > cast.record.epoch:
            cast.join(record)

    def on_part_ended(self, progress: CastProgress, now: float) -> None:
        """Apply the final progress of a node's part."""
        cast = self._casts.get(progress.cast_id)
        if cast is not None and progress.epoch >= cast.since.get(progress.node, 0):
            self._finish_part(cast, progress.node, progress.state, now)

    def on_node_lost(self, node: str, now: float) -> None:
        """Fail the parts of a lost node in all casts."""
        for cast in self._casts.values():
            if node in cast.pending:
                self._finish_part(cast, node, CastState.FAILED, now)

    def _finish_part(self, cast: _TrackedCast, node: str, state: CastState, now: float) -> None:
        cast.states[node] = state
        cast.pending.discard(node)
        if cast.ended or cast.pending:
            return
        cast.ended = True
        end = CastEnded(record=cast.record, seconds=now - cast.started_s, state=cast.worst)
        for callback in self._on_end:
            callback(end)
