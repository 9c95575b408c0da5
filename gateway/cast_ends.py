"""When the casts end that this gateway heard of: a fold of the feed, bounded. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from registry.cast import CastProgress, CastRecord, CastState

_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CastEnd:
    """The last target of a cast is done. `seconds` are from when it was heard of; `state` is the worst
    that a target came to: failed, cancelled, complete."""

    record: CastRecord
    seconds: float
    state: CastState


@dataclass(slots=True)
class _Heard:
    record: CastRecord
    began_s: float
    states: dict[str, CastState] = field(default_factory=dict)  # of nodes whose part is over
    told: bool = False

    @property
    def over(self) -> bool:
        return all(member.node in self.states for member in self.record.targets)

    def join(self, record: CastRecord) -> None:
        """Take its next epoch: who came back, as another process or once more, is not over any more."""
        before = set(self.record.members)
        back = {member.node for member in record.members if member not in before} or set(self.states)
        for node in back:
            if self.states.get(node) is not CastState.COMPLETE:
                self.states.pop(node, None)
        self.record = record


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
        if known is not None:
            self._note(known, progress.node, progress.state, now)

    def lost(self, node: str, now: float) -> None:
        """A node is gone, and with it its part in all casts."""
        for heard in self._heard.values():
            if any(member.node == node for member in heard.record.targets) and node not in heard.states:
                self._note(heard, node, CastState.FAILED, now)

    def _note(self, heard: _Heard, node: str, state: CastState, now: float) -> None:
        heard.states[node] = state
        if heard.told or not heard.over:
            return
        heard.told = True
        reached = {heard.states[member.node] for member in heard.record.targets}
        order = (CastState.FAILED, CastState.CANCELLED, CastState.COMPLETE)
        worst = next(one for one in order if one in reached)
        end = CastEnd(record=heard.record, seconds=now - heard.began_s, state=worst)
        for callback in self._on_end:
            callback(end)
