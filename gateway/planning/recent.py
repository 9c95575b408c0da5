"""Averages of durations, of which the latest counts most. Pure."""

from typing import Generic, TypeVar

_LATEST = 0.5  # the weight of the latest value
_MAX_KEPT = 4096

_Key = TypeVar("_Key")


class RecentAverages(Generic[_Key]):
    """An average by key, in seconds; of many keys those with the latest values are kept."""

    def __init__(self) -> None:
        self._seen: dict[_Key, float] = {}  # the oldest first

    def __repr__(self) -> str:
        return f"<RecentAverages {self._seen}>"

    def add(self, key: _Key, seconds: float) -> None:
        """Add a value of a key."""
        before = self._seen.pop(key, seconds)
        self._seen[key] = before + _LATEST * (seconds - before)
        if len(self._seen) > _MAX_KEPT:
            del self._seen[next(iter(self._seen))]

    def get(self, key: _Key) -> float | None:
        """Return the average of a key, None without a value."""
        return self._seen.get(key)
