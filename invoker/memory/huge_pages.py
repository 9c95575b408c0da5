"""Huge pages for files in memory, whatever their file system was mounted with (Linux 6.1, MADV_COLLAPSE).

Taken this way, memory costs a tenth of what it costs in small pages, and lies together: small ones lie
anywhere after some days, and a disk's or an RDMA device's request is split where its memory is.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from invoker.memory import populate_at

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # not in Python's mmap module
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def take_huge_pages(fd: int, offset: int, nbytes: int) -> bool:
    """Back with memory the huge pages that lie whole in the range of a file opened for writing; blocks.

    What is in the file stays, the rest is zeros. False where some are not huge, as in kernels that cannot
    do this. Raises OSError (ENOSPC) where no memory is left.
    """
    first = -(-offset // HUGE_PAGE) * HUGE_PAGE
    length = (offset + nbytes) // HUGE_PAGE * HUGE_PAGE - first
    if length <= 0:
        return True
    with _mapped(fd, first, length) as address:
        # A huge page is only made of one that has some memory.
        for at in range(0, length, HUGE_PAGE):
            if not populate_at(address + at, mmap.PAGESIZE):
                return False
        return bool(_libc.madvise(address, length, _MADV_COLLAPSE) == 0)


@contextmanager
def _mapped(fd: int, offset: int, length: int) -> Iterator[int]:
    """The address of a mapping for a while, aligned as huge pages are: Python's may be anywhere."""
    whole = length + HUGE_PAGE
    base = _map(None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    try:
        address = -(-base // HUGE_PAGE) * HUGE_PAGE
        writable = mmap.PROT_READ | mmap.PROT_WRITE
        yield _map(address, length, writable, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    finally:
        _libc.munmap(base, whole)


def _map(address: int | None, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, length, protection, flags, fd, offset)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno()
        raise OSError(errno.ENOSPC if code == errno.ENOMEM else code, os.strerror(code))
    return int(mapped)
