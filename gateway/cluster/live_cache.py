"""A cache of the live serving state of each version: a fold of the change feed. Pure.

Time is the caller's monotonic clock.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gateway.cluster.replicas import PipelineReplica, pipeline_replica
from registry.records.change import LiveChanged
from registry.records.live import InstanceRole, LiveRecord

_MAX_CLOSED = 4096  # pipelines that have closed


@dataclass(frozen=True, slots=True, kw_only=True)
class _LiveEntry:
    record: LiveRecord
    replicas: tuple[PipelineReplica, ...]
    deadline_s: float


class LiveStateCache:
    """A cache of the latest live record of each version, and of its pipelines as replicas."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], _LiveEntry] = {}
        self._closed: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"<LiveStateCache {[entry.record for entry in self._entries.values()]}>"

    def __iter__(self) -> Iterator[LiveRecord]:
        return iter([entry.record for entry in self._entries.values()])

    def load(self, changes: Iterable[LiveChanged], now: float, grace_s: float) -> None:
        """Replace all records except newer ones; none expires before `grace_s`."""
        known = self._entries
        self._entries = {}
        for change in changes:
            self.update(replace(change, ttl_s=max(change.ttl_s, grace_s)), now)
        for key, entry in known.items():
            if key not in self._entries or entry.record.order > self._entries[key].record.order:
                self._entries[key] = entry

    def update(self, change: LiveChanged, now: float) -> None:
        """Store the record unless a newer one is known."""
        key = change.record.function, change.record.version
        known = self._entries.get(key)
        if known is not None and change.record.order < known.record.order:
            return
        if known is not None and change.record.controller_epoch > known.record.controller_epoch:
            for pipeline in change.record.pipelines:  # recovered by a new controller, and reopened if needed
                self._closed.pop(pipeline.name, None)
        replicas = tuple(map(pipeline_replica, change.record.pipelines))
        self._entries[key] = _LiveEntry(
            record=change.record, replicas=replicas, deadline_s=now + change.ttl_s
        )

    def close(self, name: str) -> None:
        """Close a pipeline that its node reported as gone; no call is sent there, whatever its record is."""
        self._closed[name] = None
        if len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def expire(self, now: float) -> bool:
        """Remove expired records; return whether there were any."""
        over = [key for key, entry in self._entries.items() if entry.deadline_s <= now]
        for key in over:
            del self._entries[key]
        return bool(over)

    def postpone(self, until: float) -> None:
        """Extend all leases to `until` at least."""
        for key, entry in self._entries.items():
            self._entries[key] = replace(entry, deadline_s=max(entry.deadline_s, until))

    @property
    def deadlines(self) -> list[float]:
        return [entry.deadline_s for entry in self._entries.values()]

    def record(self, function: str, version: int) -> LiveRecord | None:
        entry = self._entries.get((function, version))
        return None if entry is None else entry.record

    def roles(self, function: str, version: int) -> Mapping[str, InstanceRole]:
        """Return the roles of instances, by id."""
        entry = self._entries.get((function, version))
        return {} if entry is None else entry.record.roles

    def replicas(
        self, function: str, version: int, usable: Callable[[str], bool]
    ) -> tuple[PipelineReplica, ...]:
        """Return the pipelines of which all nodes are usable."""
        entry = self._entries.get((function, version))
        if entry is None or not entry.replicas:
            return ()
        return tuple(
            replica
            for replica in entry.replicas
            if replica.instance_id not in self._closed
            and all(usable(stage.node) for stage in replica.pipeline.stages)
        )
