"""Page-level operations on large mappings: addresses, huge pages, population without faults or SIGBUS."""

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
# Populating pages blocks memory mapping in other threads, so it is done in small steps with pauses.
GENTLE_STEP_BYTES = 256 << 10
_PAUSE_FACTOR = 4  # pause per step, in multiples of the step's duration
_BUSY_PAUSE_FACTOR = 100
_IDLE_SHARE = 0.05  # of a CPU; heartbeats use less
_CGROUPS = Path("/sys/fs/cgroup")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address_of(buffer: mmap.mmap | memoryview) -> int:
    """Return the address of a writable buffer, which the caller keeps alive while it uses the address."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def advise_huge(mapping: mmap.mmap) -> bool:
    """Request transparent huge pages; return False if the kernel does not support them."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return False
    return True


def populate(mapping: mmap.mmap, offset: int, nbytes: int) -> bool:
    """Populate the pages of `[offset, offset + nbytes)`, without holding the GIL.

    Return False if the kernel does not support it. Raises OSError (ENOSPC) if the file system or the host has
    no memory left: a write to such a page would kill the process by SIGBUS.
    """
    if nbytes == 0:
        return True
    page = mmap.PAGESIZE
    start = offset // page * page
    return populate_at(address_of(mapping) + start, offset + nbytes - start)


def populate_at(address: int, nbytes: int) -> bool:
    """Populate from a page-aligned address on (see `populate`)."""
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    if code in (errno.EFAULT, errno.ENOMEM, errno.ENOSPC):
        raise OSError(errno.ENOSPC, "no memory left for the mapping")
    raise OSError(code, os.strerror(code))


def populate_gently(mapping: mmap.mmap, nbytes: int, stop: threading.Event) -> None:
    """Populate the first `nbytes` until `stop` is set, with long pauses.

    Raises OSError as `populate` does.
    """

    def take(offset: int) -> int:
        step = min(GENTLE_STEP_BYTES, nbytes - offset)
        return step if populate(mapping, offset, step) else 0

    run_gently(take, nbytes, stop)


def pause_after(spent_s: float, others_share: float) -> float:
    """Return a background thread's pause after a step of `spent_s`.

    `others_share` is the CPU share of the process's other threads.
    """
    return spent_s * (_PAUSE_FACTOR if others_share < _IDLE_SHARE else _BUSY_PAUSE_FACTOR)


def run_gently(take: Callable[[int], int], nbytes: int, stop: threading.Event) -> None:
    """Call `take(offset)` from 0 on until `nbytes` are populated, with long pauses, longer under load.

    `take` returns the bytes it populated; 0 ends the loop, as does `stop`. A low-priority thread would not
    do: preempted while it holds the GIL or the kernel's mmap lock, it would block the whole process.
    """
    offset, seen_s, others_s = 0, time.monotonic(), _others_s()
    while offset < nbytes and not stop.is_set():
        started_s = time.monotonic()
        took = take(offset)
        if not took:
            return
        offset += took
        now_s, now_others_s = time.monotonic(), _others_s()
        share = (now_others_s - others_s) / max(now_s - seen_s, 1e-6)
        seen_s, others_s = now_s, now_others_s
        stop.wait(pause_after(now_s - started_s, share))


def _others_s() -> float:
    """Return the CPU time of the process's other threads."""
    return time.process_time() - time.thread_time()


def available_bytes() -> int:
    """Return the memory available without swapping, within the limits of this process's control groups."""
    found = int(psutil.virtual_memory().available)
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    except OSError:
        return found
    for folder in (_CGROUPS / group, *(_CGROUPS / group).parents):
        try:
            limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        except OSError:
            continue  # the root group has no limit
        if limit.strip() != "max":
            found = min(found, int(limit) - int(used))
    return found
