"""Reader of blobs in a local folder."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from registry.errors import StoreError, StoreFull
from registry.images.page_cache import PageCacheMap

DIRECT_BYTES = 1024 * 1024  # smaller reads gain nothing from bypassing the page cache
ALIGNED_BYTES = 4096  # the alignment of direct reads
# A disk serves concurrent reads alike: more would end together, and it would wait while all are verified.
DIRECT_READS = 2

PositionalRead = Callable[[int, Sequence[memoryview], int], int]  # descriptor, buffers, offset


@dataclass(frozen=True, slots=True)
class _Direct:
    """A blob opened with O_DIRECT, its residency in the page cache, and what holds back reads of it."""

    descriptor: int
    cached: PageCacheMap
    reads: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(DIRECT_READS))


class LocalReader:
    """An open blob, read straight into the caller's buffer.

    Cached ranges are read from the page cache. The rest of a large read bypasses it: the disk writes into the
    buffer itself, and the blob, once it is in the host tier, is not in memory a second time. Other threads
    wait while DIRECT_READS are under way. `read` does what `os.preadv` does.
    """

    def __init__(self, path: Path, read: PositionalRead = os.preadv) -> None:
        self._path = path
        self._preadv = read
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed in close)
        self._size = os.fstat(self._file.fileno()).st_size
        self._direct = _open_direct(path) if self._size >= DIRECT_BYTES else None
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __repr__(self) -> str:
        return f"<LocalReader {self._path.name[:12]} {'closed' if self._file.closed else self._size}>"

    @property
    def size(self) -> int:
        return self._size

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    def cached(self, offset: int, nbytes: int) -> int | None:
        return self._file.fileno() if self._is_cached(offset, nbytes) else None

    def read_into(self, offset: int, into: memoryview) -> None:
        if not 0 <= offset <= offset + len(into) <= self._size:
            raise ValueError(f"[{offset}, {offset + len(into)}) is not within {self._size} bytes")
        done = 0
        with translated(self._path):
            while done < len(into):
                got = self._read(offset + done, into[done:])
                if got == 0:
                    raise StoreError(f"{self._path} was truncated")
                done += got

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Return whether most of the range is in the page cache."""
        return self._direct is not None and self._direct.cached.cached_share(offset, nbytes) > 0.5

    def _read(self, offset: int, into: memoryview) -> int:
        """Read some bytes; return their number."""
        direct = self._direct
        if direct is None or len(into) < DIRECT_BYTES or self._is_cached(offset, len(into)):
            return self._preadv(self._file.fileno(), [into], offset)
        try:
            whole = len(into) // ALIGNED_BYTES * ALIGNED_BYTES
            with direct.reads:
                return self._preadv(direct.descriptor, [into[:whole]], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the buffer or the offset is not aligned
                raise
            return self._preadv(self._file.fileno(), [into], offset)

    def close(self) -> None:
        self._file.close()
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.cached.close()
            os.close(direct.descriptor)


def _open_direct(path: Path) -> _Direct | None:
    """Open with O_DIRECT; return None where the file system does not support it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    return _Direct(descriptor, PageCacheMap(descriptor))


@contextmanager
def translated(where: Path) -> Iterator[None]:
    """Raise failures of the file system as StoreError or StoreFull."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"no space left in the store: {where}") from error
        raise StoreError(f"{where}: {error.strerror or error}") from error
