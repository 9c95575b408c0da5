"""The backoff table: failed starts and failed copies of images, by what failed and on which node. Pure.

Time is the caller's monotonic clock.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

_MAX_FAILURES = 64  # logged per subject and node


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """A failed start. `node` is "" if the node was lost, for which the function is not at fault."""

    serial: int
    instance_id: str
    node: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _BackoffEntry:
    """The failures of one subject on one node.

    No retry before `until`, after `count` failures in a row. Until `space_until` the subject is known to need
    `min_bytes` of the arena besides its image, for the `reason` that the node gave.
    """

    count: int = 0
    until: float = 0.0
    min_bytes: int = 0
    reason: str = ""
    space_until: float = 0.0
    log: tuple[StartFailure, ...] = ()


class BackoffTable:
    """Failures by subject and node, of which the waits double from `first_s` to `max_s`.

    A subject is any key: a function version for starts, the digest of an image for its host copies. A success
    resets a count, and so does a pause of `max_s` after the last wait. What a start needs of an arena expires
    after `space_s`, since it may have had another cause.
    """

    def __init__(self, *, first_s: float = 1.0, max_s: float = 60.0, space_s: float = 60.0) -> None:
        self.serial = 0  # of the last logged failure
        self._first_s = first_s
        self._max_s = max_s
        self._space_s = space_s
        self._entries: dict[Hashable, dict[str, _BackoffEntry]] = {}
        self._deadlines: dict[Hashable, float] = {}

    def __repr__(self) -> str:
        return f"<BackoffTable {len(self._entries)} subjects, {len(self._deadlines)} deadlines>"

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def expire(self, now: float) -> None:
        """Remove what no longer counts; logged failures stay until `clear_log`."""
        for subject, nodes in list(self._entries.items()):
            for node, entry in nodes.items():
                if entry.count and entry.until + self._max_s <= now:
                    entry = replace(entry, count=0, until=0.0)
                if entry.min_bytes and entry.space_until <= now:
                    entry = replace(entry, min_bytes=0, reason="")
                nodes[node] = entry
            self._prune(subject)

    # --- retries

    def failed(self, subject: Hashable, node: str, now: float) -> None:
        """Count a failure on the node: the wait doubles."""
        entry = self._entry(subject, node)
        wait_s = min(self._max_s, self._first_s * 2 ** min(entry.count, 32))
        self._put(subject, node, replace(entry, until=now + wait_s, count=entry.count + 1))

    def retry_at(self, subject: Hashable, node: str, now: float) -> float | None:
        """Return when the node may be tried again, None if it may be now."""
        until = self._entry(subject, node).until
        return until if now < until else None

    def waits(self, subject: Hashable, now: float) -> dict[str, float]:
        """Return the nodes that may not be tried again yet, and when each may."""
        entries = self._entries.get(subject, {})
        return {node: entry.until for node, entry in entries.items() if now < entry.until}

    def succeeded(self, subject: Hashable, node: str) -> None:
        """Reset the count of the node."""
        self._put(subject, node, replace(self._entry(subject, node), count=0, until=0.0))

    def reset(self, subject: Hashable) -> None:
        """Reset the counts of all nodes."""
        for node in list(self._entries.get(subject, ())):
            self.succeeded(subject, node)

    def count(self, subject: Hashable) -> int:
        """Return the number of failures that count, over all nodes."""
        return sum(entry.count for entry in self._entries.get(subject, {}).values())

    # --- arena space

    def no_space(self, subject: Hashable, node: str, lacked_bytes: int, reason: str, now: float) -> None:
        """Record that besides its image a start did not fit into `lacked_bytes`."""
        min_bytes = max(lacked_bytes + 1, self.min_bytes(subject))
        until = now + self._space_s
        self._put(
            subject,
            node,
            replace(self._entry(subject, node), min_bytes=min_bytes, reason=reason, space_until=until),
        )

    def min_bytes(self, subject: Hashable) -> int:
        """Return the arena bytes besides the image that starts are known to need, 0 if none failed so."""
        return max((entry.min_bytes for entry in self._entries.get(subject, {}).values()), default=0)

    def space_reason(self, subject: Hashable) -> str:
        """Return why the last start did not fit, "" if none failed so."""
        entries = [entry for entry in self._entries.get(subject, {}).values() if entry.min_bytes]
        return max(entries, key=lambda entry: entry.min_bytes).reason if entries else ""

    # --- the log

    def log(self, subject: Hashable, instance_id: str, node: str, error: str) -> None:
        """Log a failed start for the calls that wait for it; a logged instance id is ignored."""
        if any(failure.instance_id == instance_id for failure in self.failures(subject)):
            return
        self.serial += 1
        failure = StartFailure(serial=self.serial, instance_id=instance_id, node=node, error=error)
        entry = self._entry(subject, node)
        self._put(subject, node, replace(entry, log=(*entry.log, failure)[-_MAX_FAILURES:]))

    def failures(self, subject: Hashable, since_serial: int = 0) -> list[StartFailure]:
        """Return the failures logged after `since_serial`, in order."""
        logged = [f for entry in self._entries.get(subject, {}).values() for f in entry.log]
        return sorted((f for f in logged if f.serial > since_serial), key=lambda f: f.serial)

    def clear_log(self, subject: Hashable) -> None:
        """Drop the logged failures, after a start succeeded."""
        nodes = self._entries.get(subject, {})
        for node, entry in nodes.items():
            nodes[node] = replace(entry, log=())
        self._prune(subject)

    # --- subjects that no node can start

    def deadline(self, subject: Hashable, at: float) -> float:
        """Return when to fail a subject that no node can start: `at`, or what an earlier call set."""
        return self._deadlines.setdefault(subject, at)

    def set_deadline(self, subject: Hashable, at: float) -> None:
        """Replace the deadline."""
        self._deadlines[subject] = at

    def clear_deadline(self, subject: Hashable) -> None:
        """Drop the deadline: a node can start the subject."""
        self._deadlines.pop(subject, None)

    # --- inside

    def _entry(self, subject: Hashable, node: str) -> _BackoffEntry:
        return self._entries.get(subject, {}).get(node, _NONE)

    def _put(self, subject: Hashable, node: str, entry: _BackoffEntry) -> None:
        self._entries.setdefault(subject, {})[node] = entry
        self._prune(subject)

    def _prune(self, subject: Hashable) -> None:
        nodes = self._entries.get(subject, {})
        for node in [n for n, e in nodes.items() if not (e.count or e.min_bytes or e.log)]:
            del nodes[node]
        if not nodes:
            self._entries.pop(subject, None)


_NONE = _BackoffEntry()
