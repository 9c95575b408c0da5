"""Memory in huge pages that a disk writes to, and from which bytes are copied to their places.

For host tiers that cannot be in huge pages themselves: a disk's request is split where its memory is, on
virtual machines into one a page. A copy costs less, since it is made while the disk reads on.
"""

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from invoker.host_mapping import close_mapping, release
from invoker.memory import advise_huge

_HUGE_PAGE = 2 << 20


class Staging:
    """`count` buffers of `nbytes`, lent to any thread; to be closed when all are back."""

    def __init__(self, count: int, nbytes: int) -> None:
        step = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        self._mapping = mmap.mmap(-1, count * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge(self._mapping)
        whole = memoryview(self._mapping)
        self._views = [whole[at : at + nbytes] for at in range(0, count * step, step)]
        release(whole)
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for view in self._views:
            self._free.put(view)

    def __repr__(self) -> str:
        return f"<Staging {self._free.qsize()} of {len(self._views)} buffers free>"

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """A buffer for a while; blocks until one is free."""
        view = self._free.get()
        try:
            yield view
        finally:
            self._free.put(view)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for view in self._views:
            release(view)
        close_mapping(self._mapping)
