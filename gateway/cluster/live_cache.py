"""How function versions serve while they load, as this gateway knows it: a fold of the feed. Pure.

Time is the caller's monotonic clock.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gateway.servers import PipelineServer, server_of
from registry.change import LiveChanged
from registry.live import LiveRecord

_KEPT = 4096  # pipelines that are known to be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    record: LiveRecord
    servers: tuple[PipelineServer, ...]
    deadline_s: float


class KnownLive:
    """The latest record of each version, and its pipelines as servers."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._closed: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<KnownLive {[entry.record for entry in self._entries.values()]}>"

    def __iter__(self) -> Iterator[LiveRecord]:
        return iter([entry.record for entry in self._entries.values()])

    def load(self, changes: Iterable[LiveChanged], now: float, grace_s: float) -> None:
        """Replace all; what is known later than it stays, and nothing lapses at once."""
        known = self._entries
        self._entries = {}
        for change in changes:
            self.put(replace(change, ttl_s=max(change.ttl_s, grace_s)), now)
        for key, entry in known.items():
            if key not in self._entries or entry.record.order > self._entries[key].record.order:
                self._entries[key] = entry

    def put(self, change: LiveChanged, now: float) -> None:
        key = change.record.function, change.record.version
        known = self._entries.get(key)
        if known is not None and change.record.order < known.record.order:
            return
        if known is not None and change.record.controller_epoch > known.record.controller_epoch:
            for pipeline in change.record.pipelines:  # taken over, and opened anew if need be
                self._closed.pop(pipeline.name, None)
        servers = tuple(map(server_of, change.record.pipelines))
        self._entries[key] = _Entry(record=change.record, servers=servers, deadline_s=now + change.ttl_s)

    def close(self, name: str) -> None:
        """A node said that this pipeline is no more: nothing is sent there, whatever the record says."""
        self._closed[name] = None
        if len(self._closed) > _KEPT:
            del self._closed[next(iter(self._closed))]

    def expire(self, now: float) -> bool:
        over = [key for key, entry in self._entries.items() if entry.deadline_s <= now]
        for key in over:
            del self._entries[key]
        return bool(over)

    def postpone(self, until: float) -> None:
        for key, entry in self._entries.items():
            self._entries[key] = replace(entry, deadline_s=max(entry.deadline_s, until))

    @property
    def deadlines(self) -> list[float]:
        return [entry.deadline_s for entry in self._entries.values()]

    def record(self, function: str, version: int) -> LiveRecord | None:
        entry = self._entries.get((function, version))
        return None if entry is None else entry.record

    def servers(
        self, function: str, version: int, usable: Callable[[str], bool]
    ) -> tuple[PipelineServer, ...]:
        """The pipelines whose nodes are all there."""
        entry = self._entries.get((function, version))
        if entry is None or not entry.servers:
            return ()
        return tuple(
            server
            for server in entry.servers
            if server.instance_id not in self._closed
            and all(usable(stage.node) for stage in server.pipeline.stages)
        )
