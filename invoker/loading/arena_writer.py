"""An image, or a part of one, that arrives in its place in the arena."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from invoker.memory.arena import Arena, Region, copy_bytes
from rdmacast.aio.threads import run_in_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlace:
    """The bytes `[start, end)` of an image of `nbytes`, whole units, in a region of the arena."""

    arena: Arena
    region: Region
    nbytes: int
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        return (self.start, self.end) == (0, self.nbytes)


class ArenaWriter:
    """The UnitWriter of a place, which its owner frees after the load; no byte is kept elsewhere.

    Where the CPU cannot address the arena, bytes pass through page-locked memory.
    """

    path = None

    def __init__(self, place: ArenaPlace) -> None:
        self.nbytes = place.nbytes
        self.region = place.region
        self._place = place

    def __repr__(self) -> str:
        return f"<ArenaWriter [{self._place.start}, {self._place.end}) in {self.region.device}>"

    @property
    def view(self) -> memoryview | None:
        return self.region.buffer if self._place.is_whole else None

    def wanted(self, offset: int, nbytes: int) -> tuple[int, int]:
        start = max(offset, self._place.start)
        return start, max(0, min(offset + nbytes, self._place.end) - start)

    def lend(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        return self._place.arena.lend(self.region, offset - self._place.start, nbytes)

    async def keep(self, offset: int, view: memoryview) -> None:
        if not self._place.arena.in_place:
            await run_in_thread(self._place.arena.fill, self.region, offset - self._place.start, view)

    @asynccontextmanager
    async def staged(self, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        async with self._place.arena.staging(nbytes) as into:
            start = offset - self._place.start
            await run_in_thread(self._place.arena.copy_out, self.region, start, into)
            yield into

    def is_ready(self, offset: int, nbytes: int) -> bool:
        return True

    def prepare(self, offset: int, nbytes: int) -> None:
        self._place.arena.prepare(self.region, offset - self._place.start, nbytes)

    def populate_huge(self, offset: int, nbytes: int) -> bool:
        return self.region.buffer is None  # page-locked memory is contiguous

    def receive(self, offset: int, nbytes: int, source: int) -> bool:
        return False

    def write(self, offset: int, data: memoryview) -> None:
        buffer = self.region.buffer
        assert buffer is not None, "a disk reads into page-locked memory"
        start = offset - self._place.start
        copy_bytes(buffer[start : start + len(data)], data)

    def abandon(self) -> None:
        """Do nothing: the region belongs to the start."""
