"""Page-locked host memory of a node: allocated and registered with its devices once, and lent in ranges."""

import asyncio
import mmap
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from invoker.base.errors import OutOfPinnedMemory
from invoker.memory.allocator import Allocator, MemorySpan


class PinnedPool:
    """Ranges of `memory`, each whole pages, lent in the order of requests.

    Whoever waits for a range must hold no other one. Belongs to the event loop's thread.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._allocator = Allocator(len(memory) // mmap.PAGESIZE * mmap.PAGESIZE)
        self._waiting: deque[tuple[int, asyncio.Future[MemorySpan]]] = deque()

    def __repr__(self) -> str:
        return f"<PinnedPool {self.free_bytes} of {self.capacity_bytes} bytes free, {self.waiting} wait>"

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def free_bytes(self) -> int:
        return self._allocator.free_bytes

    @property
    def waiting(self) -> int:
        """The requests that wait for a range."""
        return len(self._waiting)

    @asynccontextmanager
    async def lend(self, nbytes: int) -> AsyncIterator[memoryview]:
        """Lend `nbytes`, which begin at a page, while the block lasts. Raises OutOfPinnedMemory."""
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if whole > self.capacity_bytes:
            raise OutOfPinnedMemory(
                f"{nbytes} bytes at once do not fit the pinned memory of {self.capacity_bytes} bytes"
            )
        span = await self._take(whole)
        try:
            yield self._memory[span.offset : span.offset + nbytes]
        finally:
            self._give_back(span)

    def check_integrity(self) -> None:
        self._allocator.check_integrity()

    async def _take(self, nbytes: int) -> MemorySpan:
        if not self._waiting and (span := self._allocator.allocate(nbytes)) is not None:
            return span
        taken: asyncio.Future[MemorySpan] = asyncio.get_running_loop().create_future()
        waiter = nbytes, taken
        self._waiting.append(waiter)
        try:
            return await taken
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._serve()  # the next one may need less
            elif not taken.cancelled():
                self._give_back(taken.result())
            raise

    def _give_back(self, span: MemorySpan) -> None:
        self._allocator.free(span)
        self._serve()

    def _serve(self) -> None:
        """Lend to those that wait, in their order, as far as memory goes."""
        while self._waiting:
            nbytes, taken = self._waiting[0]
            if taken.done():  # cancelled; it has not run since
                self._waiting.popleft()
                continue
            span = self._allocator.allocate(nbytes)
            if span is None:
                return
            self._waiting.popleft()
            taken.set_result(span)
