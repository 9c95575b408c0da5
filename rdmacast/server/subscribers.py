"""Who is to be told that something has changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Listeners:
    """Callbacks without arguments; one may be added several times, and come or go while all are told."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._added = 0

    def __repr__(self) -> str:
        return f"<Listeners {len(self._callbacks)}>"

    @contextmanager
    def added(self, changed: Callable[[], None]) -> Iterator[None]:
        """Inside, `changed` is among them."""
        self._added += 1
        number = self._added
        self._callbacks[number] = changed
        try:
            yield
        finally:
            del self._callbacks[number]

    def tell(self) -> None:
        for changed in tuple(self._callbacks.values()):
            changed()
