"""Page-level help for large mappings: addresses, huge pages, and population without faults or SIGBUS."""

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

# Linux 5.14; not in Python's mmap module before 3.14.
MADV_POPULATE_WRITE = 23
# While pages are taken no other thread can map memory: few are taken at once, then comes a rest.
_GENTLE_STEP_BYTES = 256 << 10
_REST = 4
_HUGE_OPTIONS = {"huge=always", "huge=within_size", "huge=advise"}
_CGROUPS = Path("/sys/fs/cgroup")

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


def has_huge_pages(folder: Path) -> bool:
    """Whether files of this folder, which lies on a tmpfs, are in huge pages where these are asked for.

    Raises OSError where the mounts cannot be read.
    """
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return not _HUGE_OPTIONS.isdisjoint(fields[-1].split(","))
    return False


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


def populate_gently(
    mapping: mmap.mmap, nbytes: int, stop: threading.Event, taken: Callable[[int], None]
) -> None:
    """Populate the first `nbytes` until `stop` is set, resting most of the time.

    `taken` is told how many bytes are there. Raises OSError as `populate` does; ends early where the
    kernel cannot populate. A thread of a low priority would not do: one that lost its processor while it
    holds the interpreter's lock, or the kernel's of this memory, holds up the whole process.
    """
    for offset in range(0, nbytes, _GENTLE_STEP_BYTES):
        step = min(_GENTLE_STEP_BYTES, nbytes - offset)
        began_s = time.monotonic()
        if stop.is_set() or not populate(mapping, offset, step):
            return
        taken(offset + step)
        stop.wait(_REST * (time.monotonic() - began_s))


def available_bytes() -> int:
    """Memory that can be taken without swapping: of the machine, and of this process's control groups."""
    found = int(psutil.virtual_memory().available)
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    except OSError:
        return found
    for folder in (_CGROUPS / group, *(_CGROUPS / group).parents):
        try:
            limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        except OSError:
            continue  # the topmost group has no limit
        if limit.strip() != "max":
            found = min(found, int(limit) - int(used))
    return found
