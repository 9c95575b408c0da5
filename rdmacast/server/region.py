"""A region of memory whose bytes may still be arriving, served to others as they come."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rdmacast.errors import RegionGone
from rdmacast.have_map import HaveMap, blocks_of
from rdmacast.intervals import IntervalSet
from rdmacast.listeners import Listeners


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    start: int
    end: int
    arrived: "asyncio.Future[None]"


class GrowingRegion:
    """A RegionSource and HaveSource over `buffer`. All methods belong to the event loop's thread.

    Bytes once marked never change. With `shm_path`, `buffer` is that file's mapping: the file has
    the region's size, is never shortened and never used for anything else; it may be renamed
    (`move`) and removed.
    """

    def __init__(
        self, buffer: memoryview | bytearray | bytes, *, shm_path: str | None = None, complete: bool = False
    ) -> None:
        self._view = memoryview(buffer).cast("B").toreadonly()
        self._nbytes = len(self._view)
        self._shm_path = shm_path
        self._have = IntervalSet()
        self._waiters: set[_Waiter] = set()
        self._failure: BaseException | None = None
        self._cast: tuple[int, HaveMap] | None = None  # block size and map of the cast that fills it
        self._epoch = 0  # of the last cast
        self._listeners = Listeners()
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

    def move(self, shm_path: str) -> None:
        """The file was renamed."""
        self._shm_path = shm_path

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def mark(self, offset: int, nbytes: int) -> None:
        """`[offset, offset + nbytes)` has arrived and was checked: wake who waits for it."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is outside the region of {self._nbytes} bytes")
        self._have.add(offset, offset + nbytes)
        for waiter in [w for w in self._waiters if self._have.covers(w.start, w.end)]:
            self._waiters.discard(waiter)
            if not waiter.arrived.done():
                waiter.arrived.set_result(None)
        if self._cast is None:
            self._listeners.tell()

    def complete(self) -> None:
        """All bytes are there."""
        self.mark(0, self._nbytes)

    def fail(self, reason: BaseException) -> None:
        """What is missing will never come: who waits for it gets RegionGone."""
        self._failure = reason
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.arrived.done():
                waiter.arrived.set_exception(self._gone())
        self._listeners.tell()

    def cast(self, block_bytes: int, told: HaveMap) -> None:
        """A cast fills the region, and this is where it stands; what `told` holds was marked before."""
        last, self._cast, self._epoch = self._cast, (block_bytes, told), max(self._epoch, told.epoch)
        if last is None or last[0] != block_bytes or told.tells_more(last[1]):
            self._listeners.tell()

    def cast_ended(self) -> None:
        """No cast fills the region any more; what is missing others will bring."""
        self._cast = None
        self._listeners.tell()

    def have_map(self, block_bytes: int) -> HaveMap:
        if self._cast is not None and self._cast[0] == block_bytes:
            return self._cast[1]
        blocks, held = blocks_of(self._nbytes, block_bytes), 0
        for start, end in self._have.ranges:
            first = -(-start // block_bytes)
            last = blocks if end == self._nbytes else end // block_bytes
            held |= (1 << last) - (1 << first) if last > first else 0
        coming = 0
        if self._cast is None and self._failure is None:
            coming = ((1 << blocks) - 1) & ~held
        return HaveMap(blocks=blocks, epoch=self._epoch, held=held, coming=coming)

    def watch(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        return self._listeners.added(changed)

    async def wait_for(self, offset: int, nbytes: int) -> None:
        if self._have.covers(offset, offset + nbytes):
            return
        if offset < 0 or offset + nbytes > self._nbytes:
            raise RegionGone(f"[{offset}, {offset + nbytes}) is outside the region of {self._nbytes} bytes")
        if self._failure is not None:
            raise self._gone()
        waiter = _Waiter(offset, offset + nbytes, asyncio.get_running_loop().create_future())
        self._waiters.add(waiter)
        try:
            await waiter.arrived
        finally:
            self._waiters.discard(waiter)

    def _gone(self) -> RegionGone:
        gone = RegionGone(f"the region will never be complete: {self._failure}")
        gone.__cause__ = self._failure
        return gone
