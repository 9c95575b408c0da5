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
GENTLE_STEP_BYTES = 256 << 10
_REST = 4  # times as long as it works
_BUSY_REST = 100
_IDLE_SHARE = 0.05  # of a processor: heartbeats take less
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


def populate(mapping: mmap.mmap, offset: int, nbytes: int) -> bool:
    """Back the pages of `[offset, offset + nbytes)` with memory now, outside the interpreter lock.

    Raises OSError (ENOSPC) where the file system or the host has no memory left: a plain write to
    such a page would kill the process by SIGBUS. False where the kernel cannot populate.
    """
    if nbytes == 0:
        return True
    page = mmap.PAGESIZE
    start = offset // page * page
    return populate_at(address_of(mapping) + start, offset + nbytes - start)


def populate_at(address: int, nbytes: int) -> bool:
    """As `populate`, from the start of a page on."""
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    if code in (errno.EFAULT, errno.ENOMEM, errno.ENOSPC):
        raise OSError(errno.ENOSPC, "no memory is left for the mapping")
    raise OSError(code, os.strerror(code))


def populate_gently(mapping: mmap.mmap, nbytes: int, stop: threading.Event) -> None:
    """Populate the first `nbytes` until `stop` is set, resting most of the time. Raises as `populate`."""

    def take(offset: int) -> int:
        step = min(GENTLE_STEP_BYTES, nbytes - offset)
        return step if populate(mapping, offset, step) else 0

    take_gently(take, nbytes, stop)


def rest_after(spent_s: float, others_share: float) -> float:
    """How long a thread that works in the background rests after so much work, while the process's other
    threads use that share of a processor."""
    return spent_s * (_REST if others_share < _IDLE_SHARE else _BUSY_REST)


def take_gently(take: Callable[[int], int], nbytes: int, stop: threading.Event) -> None:
    """Have `take(offset)` take memory from 0 on, resting most of the time, and nearly always while the
    process has something else to do.

    It says how many bytes it took; this ends with 0, with `nbytes`, or with `stop`. A thread of a low
    priority would not do: one that lost its processor while it holds the interpreter's lock, or the
    kernel's of this memory, holds up the whole process.
    """
    offset, seen_s, others_s = 0, time.monotonic(), _others_s()
    while offset < nbytes and not stop.is_set():
        began_s = time.monotonic()
        took = take(offset)
        if not took:
            return
        offset += took
        now_s, now_others_s = time.monotonic(), _others_s()
        share = (now_others_s - others_s) / max(now_s - seen_s, 1e-6)
        seen_s, others_s = now_s, now_others_s
        stop.wait(rest_after(now_s - began_s, share))


def _others_s() -> float:
    """Processor time of the process's threads but this one."""
    return time.process_time() - time.thread_time()


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
