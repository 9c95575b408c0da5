"""Files of the host tier mapped into this process."""

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path


class HostMapping:
    """A complete image, mapped and kept from eviction until `close`."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)[:nbytes].toreadonly()

    def __repr__(self) -> str:
        return f"<HostMapping {self.path.name[:12]} {'closed' if self._fd < 0 else 'open'}>"

    @property
    def view(self) -> memoryview:
        return self._view

    def close(self) -> None:
        """Let the image go. Idempotent; views that others still hold stay readable until they drop them."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # mmap holds a duplicate of the descriptor: only an explicit unlock ends the lock now.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        mapping, self._mapping = self._mapping, None
        release(self._view)
        close_mapping(mapping)


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    # An empty file cannot be mapped; one page of it can be, since the view is cut to size anyway.
    return mmap.mmap(fd, nbytes) if nbytes else mmap.mmap(-1, mmap.PAGESIZE)


def release(view: memoryview) -> None:
    """Let a view go now, not when it is collected; one that is being read stays until it is."""
    with suppress(BufferError):
        view.release()


def close_mapping(mapping: mmap.mmap | None) -> None:
    # While somebody still holds a view (a peer's read under way), the mapping goes with the last view.
    with suppress(BufferError):
        if mapping is not None:
            mapping.close()


def close_if_open(mapping: HostMapping | None) -> None:
    """Close what `HostTier.open` gave, if it gave anything."""
    if mapping is not None:
        mapping.close()
