"""The arena: accelerator memory taken once at start, so that no start of an instance allocates any."""

import logging
import mmap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from invoker.allocator import Allocator, Span
from invoker.errors import OutOfDeviceMemory, StartFailed
from invoker.memory import address_of, advise_huge, populate_gently
from invoker.threads import in_thread
from invoker.together import together

# Above a share of the cache the C library copies past it, a quarter faster; two copies at once use what
# one core leaves of the memory's bandwidth.
COPY_CHUNK_BYTES = 16 << 20
COPIES_IN_FLIGHT = 2
PREFAULT_BYTES = 1 << 30  # what a CPU arena takes ahead of use; it is filled from its start on

log = logging.getLogger("invoker.arena")


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A reserved range of an arena; a DeviceRegion (invoker/engine/contract.py).

    `buffer` is None where the processor cannot address the memory. Identity is equality.
    """

    span: Span
    nbytes: int
    pointer: int
    device: str
    buffer: memoryview | None


class Arena(Protocol):
    """Device memory of one node. Regions are 256-byte aligned and keep whatever bytes lay there before.

    `reserve` and `free` belong to one thread (the event loop's); `copy_in` may run in any.
    """

    @property
    def device(self) -> str: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def largest_free_bytes(self) -> int: ...

    @property
    def copy_bytes(self) -> int:
        """How much of an image is best copied at once."""
        ...

    def reserve(self, nbytes: int) -> Region:
        """Raises OutOfDeviceMemory, saying how much is free."""
        ...

    def free(self, region: Region) -> None:
        """Give a region back. Raises ValueError if it is not reserved."""
        ...

    def pinned(self, view: memoryview) -> AbstractContextManager[None]:
        """Prepare host memory that is about to be copied from, for as long as the context lasts."""
        ...

    def copy_in(self, region: Region, offset: int, data: memoryview) -> None:
        """Copy host memory to `[offset, offset + len(data))` of the region; returns when it is there."""
        ...

    def close(self) -> None:
        """Give the memory back to the system. No region may be used any more."""
        ...


class SpanArena:
    """What arenas share: reserving spans of one contiguous range that starts at `base`."""

    copy_bytes = COPY_CHUNK_BYTES

    def __init__(self, device: str, capacity_bytes: int, base: int, memory: memoryview | None) -> None:
        self.device = device
        self._base = base
        self._memory = memory
        self._allocator = Allocator(capacity_bytes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device} {self._allocator!r}>"

    @property
    def base(self) -> int:
        """Where it begins."""
        return self._base

    @property
    def capacity_bytes(self) -> int:
        return self._allocator.capacity_bytes

    @property
    def free_bytes(self) -> int:
        return self._allocator.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._allocator.largest_free_bytes

    def reserve(self, nbytes: int) -> Region:
        span = self._allocator.allocate(nbytes)
        if span is None:
            raise OutOfDeviceMemory(
                f"{nbytes} bytes do not fit the arena of {self.capacity_bytes} bytes on {self.device}: "
                f"{self.free_bytes} are free, {self.largest_free_bytes} of them in one piece"
            )
        buffer = None if self._memory is None else self._memory[span.offset : span.offset + nbytes]
        return Region(span, nbytes, self._base + span.offset, self.device, buffer)

    def free(self, region: Region) -> None:
        self._allocator.free(region.span)

    def check_integrity(self) -> None:
        self._allocator.check_integrity()


class CpuArena(SpanArena):
    """The arena of a CPU node: anonymous memory of its own, so a start copies as it would to a GPU.

    A background thread takes the pages little by little, so that neither the node's start nor an
    instance's first copy waits for them; the copy takes what is still missing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, max(mmap.PAGESIZE, capacity_bytes))
        advise_huge(self._mapping)
        super().__init__("cpu", capacity_bytes, address_of(self._mapping), memoryview(self._mapping))
        self._closing = threading.Event()
        self._prefault = threading.Thread(target=self._take_pages, name="arena-prefault", daemon=True)
        self._prefault.start()

    def _take_pages(self) -> None:
        size = min(len(self._mapping), PREFAULT_BYTES)
        try:
            populate_gently(self._mapping, size, self._closing)
        except OSError as error:
            log.warning("the arena of %d bytes is larger than the free memory: %s", size, error)

    def pinned(self, view: memoryview) -> AbstractContextManager[None]:
        return nullcontext()

    def copy_in(self, region: Region, offset: int, data: memoryview) -> None:
        assert region.buffer is not None
        target = np.frombuffer(region.buffer, np.uint8)[offset : offset + len(data)]
        np.copyto(target, np.frombuffer(data, np.uint8))  # lets the interpreter lock go, unlike a slice

    def close(self) -> None:
        self._closing.set()
        self._prefault.join()
        # Engines may hold views until they are collected; the mapping goes with the last of them.
        self._memory = None


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy to the device took: only the time spent copying counts, not that spent waiting."""

    nbytes: int
    busy_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.busy_s / 1e9 if self.busy_s else 0.0


@asynccontextmanager
async def pinned(arena: Arena, view: memoryview) -> AsyncIterator[None]:
    """`arena.pinned` off the event loop: locking the pages of a large image takes seconds."""
    pinning = arena.pinned(view)
    if isinstance(pinning, nullcontext):  # nothing to lock: no thread is worth asking
        yield
        return

    def unpin() -> None:
        pinning.__exit__(None, None, None)

    await in_thread(pinning.__enter__, undo=lambda _: unpin())
    try:
        yield
    finally:
        await in_thread(unpin)


async def copy_following(
    arena: Arena,
    region: Region,
    source: memoryview,
    wait_for: Callable[[int, int], Awaitable[None]],
    on_copied: Callable[[int], None],
) -> Copied:
    """Copy `source` into `region` behind its arrival: each chunk as soon as it is there.

    `wait_for(offset, nbytes)` returns once those bytes may be read; `on_copied` is told the sum so far.
    After cancellation nothing is written to the region any more. Raises StartFailed if it ends short.
    """
    total, at_once = len(source), arena.copy_bytes
    offsets = iter(range(0, total, at_once))
    copied_bytes = 0
    copies = 0
    busy_s = began_s = 0.0

    async def work() -> None:
        nonlocal copied_bytes, copies, busy_s, began_s
        for offset in offsets:
            nbytes = min(at_once, total - offset)
            await wait_for(offset, nbytes)
            if not copies:
                began_s = time.perf_counter()
            copies += 1
            try:
                await in_thread(arena.copy_in, region, offset, source[offset : offset + nbytes])
            finally:
                copies -= 1
                if not copies:
                    busy_s += time.perf_counter() - began_s
            copied_bytes += nbytes
            on_copied(copied_bytes)

    await together(*(work() for _ in range(COPIES_IN_FLIGHT)))
    if copied_bytes != total:
        raise StartFailed(f"only {copied_bytes} of {total} bytes were copied")
    return Copied(total, busy_s)
