"""Copies of whole images on this node: those in the arena, and any for background work that reads them."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol

from invoker.host_tier.tier import HostTier
from invoker.memory.arena import Region

ImageCopy = int | Region  # a file of the host tier, by its inode, or a region of the arena
ReadArena = Callable[[int, memoryview], None]  # copies the bytes from an offset of an image on, and blocks


class ArenaImages(Protocol):
    """The complete images in the arena; None is returned for others."""

    def region(self, image: str) -> Region | None: ...

    def buffer(self, image: str) -> memoryview | None:
        """Return the image's bytes if the CPU can address them."""
        ...

    def gpu_pointer(self, image: str) -> int | None:
        """Return the image's address on the device if the CPU cannot address it."""
        ...

    def reader(self, image: str) -> ReadArena | None:
        """Return the reading of the image; once it is freed here, that reads other bytes."""
        ...

    def staged(self, image: str, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend a copy of a range in host memory. Raises RegionGone."""
        ...


class OpenCopy(Protocol):
    """A copy being read, of `nbytes`."""

    @property
    def nbytes(self) -> int: ...

    def is_here(self) -> bool:
        """Return whether it still is that copy; if not, what was read may be anything."""
        ...

    def read(self, offset: int, into: memoryview) -> int:
        """Read what follows `offset`; return the number of bytes. Blocks. Raises OSError."""
        ...


class ImageCopies:
    """Opens the copies of one node. Belongs to the event loop's thread."""

    def __init__(self, tier: HostTier, arena: ArenaImages) -> None:
        self._tier = tier
        self._arena = arena

    @contextmanager
    def opened(self, image: str, copy: ImageCopy) -> Iterator[OpenCopy | None]:
        """Open a copy, which may be evicted meanwhile; None if it was."""
        if isinstance(copy, Region):
            in_arena = _InArena(self._arena, image, copy)
            yield in_arena if in_arena.is_here() else None
            return
        fd = self._tier.open_file(image, copy)
        if fd is None:
            yield None
            return
        try:
            yield _InFile(fd)
        finally:
            os.close(fd)


class _InFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def is_here(self) -> bool:
        return os.fstat(self._fd).st_nlink > 0

    def read(self, offset: int, into: memoryview) -> int:
        return os.preadv(self._fd, [into], offset)


class _InArena:
    def __init__(self, arena: ArenaImages, image: str, region: Region) -> None:
        self._arena = arena
        self._image = image
        self._region = region
        self._reader = arena.reader(image)
        self.nbytes = region.nbytes

    def is_here(self) -> bool:
        return self._arena.region(self._image) is self._region

    def read(self, offset: int, into: memoryview) -> int:
        count = min(len(into), self.nbytes - offset)
        if count and self._reader is not None:
            self._reader(offset, into[:count])
        return count
