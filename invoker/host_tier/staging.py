"""Huge-page buffers for direct disk reads, from which bytes are copied to the image.

For host tiers without huge pages: a disk request is split where its memory is not contiguous, on virtual
machines into one request per page. The copy costs less, since it overlaps with the next reads.
"""

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from invoker.host_tier.mapping import close_mapping, release
from invoker.memory.mappings import advise_huge

_HUGE_PAGE = 2 << 20


class Staging:
    """`count` buffers of `nbytes`, borrowed by any thread; closed once all are returned."""

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
    def borrow(self) -> Iterator[memoryview]:
        """Borrow a buffer while the block lasts; blocks until one is free."""
        view = self._free.get()
        try:
            yield view
        finally:
            self._free.put(view)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        for view in self._views:
            release(view)
        close_mapping(self._mapping)
