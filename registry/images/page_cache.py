"""The residency of a file in the page cache, queried without reading it."""

import ctypes
import mmap

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_SAMPLE_BYTES = 128 << 10
_RESIDENT = bytes(range(1, 256, 2))  # mincore sets the lowest bit; the others are undefined


class PageCacheMap:
    """The residency of a file of at least a page; a process that does not own the file sees all as cached."""

    def __init__(self, descriptor: int) -> None:
        # Private, so that it may be writable, as ctypes requires; it is never written or read.
        self._mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def cached_share(self, offset: int, nbytes: int) -> float:
        """Return about the share of `[offset, offset + nbytes)` in the page cache, from 0 to 1.

        For a large range only its first and last pages are queried: files enter and leave the cache in long
        runs, and querying each page costs a tenth of reading it.
        """
        first, end = offset // mmap.PAGESIZE * mmap.PAGESIZE, offset + nbytes
        if end - first <= 2 * _SAMPLE_BYTES:
            return self._share(first, end - first)
        last = (end - _SAMPLE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        return (self._share(first, _SAMPLE_BYTES) + self._share(last, end - last)) / 2

    def _share(self, first: int, nbytes: int) -> float:
        pages = -(-nbytes // mmap.PAGESIZE)
        found = ctypes.create_string_buffer(pages)
        if _libc.mincore(self._address + first, nbytes, found):
            return 0.0  # the file was truncated: reading it will fail
        return 1 - len(found.raw.translate(None, _RESIDENT)) / pages

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        self._mapping.close()
