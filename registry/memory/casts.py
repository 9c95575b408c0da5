"""Casts in one process."""

from collections.abc import Iterator

from registry.cast import CastProgress, CastRecord, CastStatus, in_order
from registry.clock import Clock
from registry.keys import CAST_TTL_S


class MemoryCasts:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, CastRecord] = {}
        self._progress: dict[str, dict[str, CastProgress]] = {}
        self._expires_at: dict[str, float] = {}

    def put(self, record: CastRecord) -> bool:
        """False if no earlier epoch of it is known."""
        self._forget_old()
        known = self._records.get(record.cast_id)
        if known is not None and record.epoch <= known.epoch:
            return False
        self._records[record.cast_id] = record
        self._keep(record.cast_id)
        return True

    def tell(self, progress: CastProgress) -> bool:
        """False if something later is known of that node."""
        self._forget_old()
        nodes = self._progress.setdefault(progress.cast_id, {})
        known = nodes.get(progress.node)
        if known is not None and not progress.follows(known):
            return False
        nodes[progress.node] = progress
        self._keep(progress.cast_id)
        return True

    def records(self) -> list[CastRecord]:
        self._forget_old()
        return in_order(self._records.values())

    def find(self, beginning: str, function: str | None, *, brief: bool) -> list[CastStatus]:
        return [
            CastStatus(record=record, progress=tuple(self._told(record, brief)))
            for record in self.records()
            if record.cast_id.startswith(beginning) and function in (None, record.function)
        ]

    def _told(self, record: CastRecord, brief: bool) -> Iterator[CastProgress]:
        told = self._progress.get(record.cast_id, {})
        if not brief:
            yield from (one for _, one in sorted(told.items()))
            return
        for node in sorted(member.node for member in record.members):
            if node in told:
                yield told[node].brief

    def _keep(self, cast_id: str) -> None:
        self._expires_at[cast_id] = self._clock.monotonic_s() + CAST_TTL_S

    def _forget_old(self) -> None:
        now = self._clock.monotonic_s()
        for cast_id in [one for one, expires_at in self._expires_at.items() if expires_at <= now]:
            self._records.pop(cast_id, None)
            self._progress.pop(cast_id, None)
            del self._expires_at[cast_id]
