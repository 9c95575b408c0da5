"""Which parts of a file the kernel has in memory, asked without reading any."""

import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_ASKED_BYTES = 128 << 10
_RESIDENT = bytes(range(1, 256, 2))  # the lowest bit of a page's byte says so; the others say nothing


class PageCacheMap:
    """The residency of a file of at least a page. To whom the file does not belong, all seems cached."""

    def __init__(self, descriptor: int) -> None:
        # Private, so that it may be writable, which ctypes wants of a buffer; nobody writes or reads it.
        self._mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def cached_share(self, offset: int, nbytes: int) -> float:
        """About how much of `[offset, offset + nbytes)` need not be read from the disk, from 0 to 1.

        Of a large range its first and last pages stand for all: files come into the cache and leave it by
        long runs, and asking about each page costs a tenth of reading it.
        """
        first, end = offset // mmap.PAGESIZE * mmap.PAGESIZE, offset + nbytes
        if end - first <= 2 * _ASKED_BYTES:
            return self._share(first, end - first)
        last = (end - _ASKED_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        return (self._share(first, _ASKED_BYTES) + self._share(last, end - last)) / 2

    def _share(self, first: int, nbytes: int) -> float:
        pages = -(-nbytes // mmap.PAGESIZE)
        found = ctypes.create_string_buffer(pages)
        if _libc.mincore(self._address + first, nbytes, found):
            return 0.0  # the file has become shorter: reading it will tell
        return 1 - len(found.raw.translate(None, _RESIDENT)) / pages

    def close(self) -> None:
        """Idempotent."""
        self._mapping.close()
