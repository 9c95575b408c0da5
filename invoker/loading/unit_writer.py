"""The seam to the memory in which the units of an image arrive."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from invoker.memory.arena import Region


class UnitWriter(Protocol):
    """Memory of an image of `nbytes`, or of a part of it; a BlockMemory, of which lent ranges are filled.

    `view` is all of it where that can be addressed and has the size of the image, `path` its file where it
    has one, `region` its place in an arena. `prepare` and what follows block, and run in any thread.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def view(self) -> memoryview | None: ...

    @property
    def path(self) -> Path | None: ...

    @property
    def region(self) -> Region | None: ...

    def wanted(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the part of a range that is to be read: all of it, but of a part of an image."""
        ...

    def lend(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend the memory of a wanted range. Raises OutOfPinnedMemory."""
        ...

    async def keep(self, offset: int, view: memoryview) -> None:
        """Bring checked bytes, in the memory that was lent for them, to their place."""
        ...

    def staged(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend a copy of a range that was kept, where it cannot be viewed."""
        ...

    def is_ready(self, offset: int, nbytes: int) -> bool:
        """Return whether a write to the range causes no allocation or page fault."""
        ...

    def prepare(self, offset: int, nbytes: int) -> None:
        """Populate the range before it is written. Raises HostTierFull, OSError."""
        ...

    def populate_huge(self, offset: int, nbytes: int) -> bool:
        """Populate the range with huge pages if possible; return whether a disk reads into it well."""
        ...

    def receive(self, offset: int, nbytes: int, source: int) -> bool:
        """Copy a range of an open file to the same offset; False if that is no faster than reading it."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` to `offset`."""
        ...

    def abandon(self) -> None:
        """Release the memory. Idempotent."""
        ...
