"""A bounded set of items that have no user, each of which expires."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class IdleSet(Generic[T]):
    """At most `most` idle items, the oldest first, each for at most `idle_s`.

    `on_expired` is called with each item that leaves without a user: it expired, or there were too many.
    """

    def __init__(self, most: int, idle_s: float, on_expired: Callable[[T], None]) -> None:
        self._most = most
        self._idle_s = idle_s
        self._on_expired = on_expired
        self._timers: dict[T, asyncio.TimerHandle] = {}

    def __repr__(self) -> str:
        return f"<IdleSet {len(self._timers)} of at most {self._most}>"

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._timers))

    def add(self, item: T) -> None:
        """Add an item as the newest one."""
        self.discard(item)
        self._timers[item] = asyncio.get_running_loop().call_later(self._idle_s, self._expire, item)
        if len(self._timers) > self._most:
            self._expire(next(iter(self._timers)))

    def discard(self, item: T) -> None:
        """Remove an item that has a user again, or has ended; does nothing if it is not here."""
        timer = self._timers.pop(item, None)
        if timer is not None:
            timer.cancel()

    def expire_all(self) -> None:
        """Let every item expire now."""
        for item in self:
            self._expire(item)

    def _expire(self, item: T) -> None:
        self.discard(item)
        self._on_expired(item)
