"""Destinations of reads."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol


class BlockMemory(Protocol):
    """Where the blocks of a region of `nbytes` go. Belongs to the event loop's thread.

    Lent memory belongs to the borrower until it is returned. What was kept is in its place, and no other
    memory of the region is written to.
    """

    @property
    def nbytes(self) -> int: ...

    def wanted(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the part of a range, as (offset, size), that is to be read."""
        ...

    def lend(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend writable memory for a wanted range; waits where it is short."""
        ...

    async def keep(self, offset: int, view: memoryview) -> None:
        """Bring the bytes of a checked range, in the memory that was lent for it, to their place."""
        ...

    def close(self) -> None:
        """Release the memory; nothing is lent any more. Idempotent."""
        ...


class BufferMemory:
    """The BlockMemory of a whole region in one buffer, which is not closed. Raises ValueError."""

    def __init__(self, buffer: memoryview) -> None:
        self._view = writable_bytes(buffer)

    @property
    def nbytes(self) -> int:
        return len(self._view)

    def wanted(self, offset: int, nbytes: int) -> tuple[int, int]:
        return offset, nbytes

    @asynccontextmanager
    async def lend(self, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        yield self._view[offset : offset + nbytes]

    async def keep(self, offset: int, view: memoryview) -> None:
        """Do nothing: the bytes are in their place."""

    def close(self) -> None:
        self._view.release()


def writable_parts(into: memoryview, most_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and the view of each part of `into`, at most `most_bytes` long. Raises ValueError."""
    into = writable_bytes(into)
    for start in range(0, len(into), most_bytes):
        yield start, into[start : start + most_bytes]


def writable_bytes(into: memoryview) -> memoryview:
    """Return `into` as bytes. Raises ValueError if it is read-only."""
    if into.readonly:
        raise ValueError("the destination is read-only")
    return into.cast("B")
