"""Subscribers to a change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Subscribers:
    """Callbacks without arguments; one may be added several times, also during `notify`."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"<Subscribers {len(self._callbacks)}>"

    @contextmanager
    def subscribed(self, changed: Callable[[], None]) -> Iterator[None]:
        """Subscribe `changed` inside."""
        self._count += 1
        number = self._count
        self._callbacks[number] = changed
        try:
            yield
        finally:
            del self._callbacks[number]

    def notify(self) -> None:
        for changed in tuple(self._callbacks.values()):
            changed()
