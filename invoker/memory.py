"""Page-level help for large mappings: addresses, huge pages, and population without faults or SIGBUS."""

import ctypes
import errno
import mmap
import os

# Linux 5.14; not in Python's mmap module before 3.14.
MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address_of(buffer: mmap.mmap | memoryview) -> int:
    """Where a writable buffer lies. The caller keeps it alive for as long as it uses the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def advise_huge(mapping: mmap.mmap) -> bool:
    """Ask for transparent huge pages; False where the kernel has none to give."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True


def populate(mapping: mmap.mmap, offset: int, nbytes: int) -> bool:
    """Back the pages of `[offset, offset + nbytes)` with memory now, outside the interpreter lock.

    Raises OSError (ENOSPC) where the file system or the host has no memory left: a plain write to
    such a page would kill the process by SIGBUS. False where the kernel cannot populate.
    """
    if nbytes == 0:
        return True
    page = mmap.PAGESIZE
    start = offset // page * page
    length = offset + nbytes - start
    if _libc.madvise(address_of(mapping) + start, length, MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    if code in (errno.EFAULT, errno.ENOMEM, errno.ENOSPC):
        raise OSError(errno.ENOSPC, "no memory is left for the mapping")
    raise OSError(code, os.strerror(code))
