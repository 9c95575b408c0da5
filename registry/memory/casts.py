"""Casts in one process, as in `registry.redis.casts`."""

from collections.abc import Iterator

from registry.clock import Clock
from registry.keys import CAST_TTL_S
from registry.records.cast import CastProgress, CastRecord, CastStatus, latest_first


class MemoryCasts:
    """Casts and the progress of their nodes, by the clock's time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, CastRecord] = {}
        self._progress: dict[str, dict[str, CastProgress]] = {}
        self._expires_at: dict[str, float] = {}

    def put(self, record: CastRecord) -> bool:
        """Store the record unless it is not newer than the known one; return whether it was stored."""
        self._expire()
        known = self._records.get(record.cast_id)
        if known is not None and record.epoch <= known.epoch:
            return False
        self._records[record.cast_id] = record
        self._renew(record.cast_id)
        return True

    def put_progress(self, progress: CastProgress) -> bool:
        """Store the progress unless a later one of that node is known; return whether it was stored."""
        self._expire()
        nodes = self._progress.setdefault(progress.cast_id, {})
        known = nodes.get(progress.node)
        if known is not None and not progress.follows(known):
            return False
        nodes[progress.node] = progress
        self._renew(progress.cast_id)
        return True

    def records(self) -> list[CastRecord]:
        self._expire()
        return latest_first(self._records.values())

    def find(self, prefix: str, function: str | None, *, brief: bool) -> list[CastStatus]:
        return [
            CastStatus(record=record, progress=tuple(self._progress_of(record, brief)))
            for record in self.records()
            if record.cast_id.startswith(prefix) and function in (None, record.function)
        ]

    def _progress_of(self, record: CastRecord, brief: bool) -> Iterator[CastProgress]:
        progress = self._progress.get(record.cast_id, {})
        if not brief:
            yield from (one for _, one in sorted(progress.items()))
            return
        for node in sorted(member.node for member in record.members):
            if node in progress:
                yield progress[node].brief

    def _renew(self, cast_id: str) -> None:
        self._expires_at[cast_id] = self._clock.monotonic_s() + CAST_TTL_S

    def _expire(self) -> None:
        now = self._clock.monotonic_s()
        for cast_id in [one for one, expires_at in self._expires_at.items() if expires_at <= now]:
            self._records.pop(cast_id, None)
            self._progress.pop(cast_id, None)
            del self._expires_at[cast_id]
