"""Files of the host tier mapped into this process."""

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path


class HostMapping:
    """A mapped complete image, which cannot be evicted until `close`."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.inode = os.fstat(fd).st_ino
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)[:nbytes].toreadonly()

    def __repr__(self) -> str:
        return f"<HostMapping {self.path.name[:12]} {'closed' if self._fd < 0 else 'open'}>"

    @property
    def view(self) -> memoryview:
        return self._view

    def reopen(self) -> int:
        """Return a new descriptor of the file, for reading; it does not keep the image from eviction."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Release the image for eviction. Idempotent; views held by others stay readable."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # mmap holds a duplicate of the descriptor, so only an explicit unlock ends the lock.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        mapping, self._mapping = self._mapping, None
        release(self._view)
        close_mapping(mapping)


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    # An empty file cannot be mapped: map one anonymous page instead, since the view has the file's size.
    return mmap.mmap(fd, nbytes) if nbytes else mmap.mmap(-1, mmap.PAGESIZE)


def release(view: memoryview) -> None:
    """Release a view now, not at garbage collection, unless it is being read."""
    with suppress(BufferError):
        view.release()


def close_mapping(mapping: mmap.mmap | None) -> None:
    # While a peer reads from a view, the mapping is freed with the last view.
    with suppress(BufferError):
        if mapping is not None:
            mapping.close()


def close_if_open(mapping: HostMapping | None) -> None:
    """Close a mapping if there is one."""
    if mapping is not None:
        mapping.close()
