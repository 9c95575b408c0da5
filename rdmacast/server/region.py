"""A region of memory that is served while its bytes arrive."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rdmacast.bitfield import Bitfield, block_count
from rdmacast.errors import NotShared, RegionGone
from rdmacast.intervals import IntervalSet
from rdmacast.server.subscribers import Subscribers


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    start: int
    end: int
    arrived: "asyncio.Future[None]"


class GrowingRegion:
    """A RegionSource and BitfieldSource over `buffer`. All methods belong to the event loop's thread.

    Marked bytes never change. Without a buffer it has `nbytes` that cannot be viewed. With `shm_path`,
    `buffer` is that file's mapping: the file has the region's size, is never shortened and never used for
    anything else; it may be removed.
    """

    def __init__(
        self,
        buffer: memoryview | bytearray | bytes | None,
        *,
        nbytes: int = 0,
        shm_path: str | None = None,
        complete: bool = False,
    ) -> None:
        self._view = None if buffer is None else memoryview(buffer).cast("B").toreadonly()
        self._nbytes = nbytes if self._view is None else len(self._view)
        self._shm_path = shm_path
        self._have = IntervalSet()
        self._waiters: set[_Waiter] = set()
        self._failure: BaseException | None = None
        self._cast: tuple[int, Bitfield] | None = None  # block size and map of the cast that fills it
        self._epoch = 0  # of the last cast
        self._subscribers = Subscribers()
        if complete:
            self.complete()

    def __repr__(self) -> str:
        if self._failure is not None:
            return f"GrowingRegion({self._nbytes} bytes, failed: {self._failure})"
        have = sum(end - start for start, end in self._have.ranges)
        return f"GrowingRegion({have} of {self._nbytes} bytes, {len(self._waiters)} waiting)"

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def shm_path(self) -> str | None:
        return self._shm_path

    @property
    def is_complete(self) -> bool:
        return self._failure is None and self._have.covers(0, self._nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        if self._view is None:
            raise NotShared("the region is not in memory that the processor can address")
        return self._view[offset : offset + nbytes]

    def mark(self, offset: int, nbytes: int) -> int:
        """Mark `[offset, offset + nbytes)` as present and checked, which wakes its waiters.

        Return the number of bytes that were not marked before.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is outside the region of {self._nbytes} bytes")
        added = self._have.add(offset, offset + nbytes)
        for waiter in [w for w in self._waiters if self._have.covers(w.start, w.end)]:
            self._waiters.discard(waiter)
            if not waiter.arrived.done():
                waiter.arrived.set_result(None)
        if self._cast is None:
            self._subscribers.notify()
        return added

    def complete(self) -> None:
        """Mark all bytes as present."""
        self.mark(0, self._nbytes)

    def fail(self, reason: BaseException) -> None:
        """Fail the region: waiters for missing bytes get RegionGone."""
        self._failure = reason
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.arrived.done():
                waiter.arrived.set_exception(self._region_gone())
        self._subscribers.notify()

    def cast(self, block_bytes: int, reported: Bitfield) -> None:
        """Record the bitfield of the cast that fills the region; its held blocks were marked before."""
        last, self._cast, self._epoch = self._cast, (block_bytes, reported), max(self._epoch, reported.epoch)
        if last is None or last[0] != block_bytes or reported.is_news_after(last[1]):
            self._subscribers.notify()

    def cast_ended(self) -> None:
        """Record that no cast fills the region any more; missing blocks may arrive otherwise."""
        self._cast = None
        self._subscribers.notify()

    def bitfield(self, block_bytes: int) -> Bitfield:
        if self._cast is not None and self._cast[0] == block_bytes:
            return self._cast[1]
        blocks, held = block_count(self._nbytes, block_bytes), 0
        for start, end in self._have.ranges:
            first = -(-start // block_bytes)
            last = blocks if end == self._nbytes else end // block_bytes
            held |= (1 << last) - (1 << first) if last > first else 0
        pending = 0
        if self._cast is None and self._failure is None:
            pending = ((1 << blocks) - 1) & ~held
        return Bitfield(blocks=blocks, epoch=self._epoch, held=held, pending=pending)

    def watch(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        return self._subscribers.subscribed(changed)

    async def wait_for(self, offset: int, nbytes: int) -> None:
        if self._have.covers(offset, offset + nbytes):
            return
        if offset < 0 or offset + nbytes > self._nbytes:
            raise RegionGone(f"[{offset}, {offset + nbytes}) is outside the region of {self._nbytes} bytes")
        if self._failure is not None:
            raise self._region_gone()
        waiter = _Waiter(offset, offset + nbytes, asyncio.get_running_loop().create_future())
        self._waiters.add(waiter)
        try:
            await waiter.arrived
        finally:
            self._waiters.discard(waiter)

    def _region_gone(self) -> RegionGone:
        gone = RegionGone(f"the region will never be complete: {self._failure}")
        gone.__cause__ = self._failure
        return gone
