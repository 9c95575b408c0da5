"""The arena: accelerator memory allocated once at start, so that starting an instance allocates none."""

import logging
import mmap
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from invoker.base.errors import OutOfDeviceMemory
from invoker.memory.allocator import Allocator, MemorySpan
from invoker.memory.mappings import address_of, advise_huge, populate_at, populate_gently

# For large copies the C library bypasses the cache, which is a quarter faster; two at once use the bandwidth
# that one core leaves.
COPY_CHUNK_BYTES = 16 << 20
_COPIES_IN_FLIGHT = 2
PREFAULT_BYTES = 1 << 30  # pre-faulted at the beginning of a CPU arena, which is allocated first

log = logging.getLogger("invoker.arena")


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A reserved range of an arena; a DeviceRegion (invoker/engine/contract.py).

    `buffer` is None if the CPU cannot address the memory. Regions compare by identity.
    """

    span: MemorySpan
    nbytes: int
    pointer: int
    device: str
    buffer: memoryview | None


class Arena(Protocol):
    """Device memory of one node; regions are 256-byte aligned and not cleared.

    A range of a region is filled in memory that is lent for it: its own where the CPU can address it, else
    page-locked host memory, from which `fill` copies it. `prepare`, `fill` and `copy_out` block, and run in
    any thread; all else runs in the event loop's.
    """

    @property
    def device(self) -> str: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def largest_free_bytes(self) -> int: ...

    def largest_if_freed(self, regions: Iterable[Region]) -> int:
        """Return the size of the largest free range if these regions were free."""
        ...

    @property
    def copy_bytes(self) -> int:
        """Return the chunk size for copies of images."""
        ...

    @property
    def copies_in_flight(self) -> int:
        """Return how many such copies run at once."""
        ...

    @property
    def in_place(self) -> bool:
        """Return whether `fill` has nothing to do: lent memory is the region's own."""
        ...

    def reserve(self, nbytes: int, *, at_end: bool = False) -> Region:
        """Reserve a region, the lowest or the highest. Raises OutOfDeviceMemory, with the free sizes."""
        ...

    def free(self, region: Region) -> None:
        """Free a region. Raises ValueError if it is not reserved."""
        ...

    def lend(self, region: Region, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend memory for a range of the region; waits where it is short. Raises OutOfPinnedMemory."""
        ...

    def prepare(self, region: Region, offset: int, nbytes: int) -> None:
        """Let a write to the lent memory of a range cause no page faults. Raises OSError without memory."""
        ...

    def fill(self, region: Region, offset: int, lent: memoryview) -> None:
        """Bring what was written to the lent memory to `[offset, offset + len(lent))`; return when done."""
        ...

    def copy_out(self, region: Region, offset: int, into: memoryview) -> None:
        """Copy a range of the region to host memory; return when done."""
        ...

    def staging(self, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend host memory into which `copy_out` is fast. Raises OutOfPinnedMemory."""
        ...

    def close(self) -> None:
        """Free the memory. No region may be used afterwards."""
        ...


class SpanArena:
    """Base of arenas: reserves spans of one contiguous address range that starts at `base`."""

    copy_bytes = COPY_CHUNK_BYTES
    copies_in_flight = _COPIES_IN_FLIGHT
    in_place = False

    def __init__(self, device: str, capacity_bytes: int, base: int, memory: memoryview | None) -> None:
        self.device = device
        self._base = base
        self._memory = memory
        self._allocator = Allocator(capacity_bytes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device} {self._allocator!r}>"

    @property
    def base(self) -> int:
        """Return the first address."""
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

    def largest_if_freed(self, regions: Iterable[Region]) -> int:
        return self._allocator.largest_if_freed(region.span for region in regions)

    def reserve(self, nbytes: int, *, at_end: bool = False) -> Region:
        span = self._allocator.allocate(nbytes, at_end=at_end)
        if span is None:
            raise OutOfDeviceMemory(
                f"{nbytes} bytes do not fit the arena of {self.capacity_bytes} bytes on {self.device}: "
                f"{self.free_bytes} bytes are free, {self.largest_free_bytes} of them contiguous"
            )
        buffer = None if self._memory is None else self._memory[span.offset : span.offset + nbytes]
        return Region(span, nbytes, self._base + span.offset, self.device, buffer)

    def free(self, region: Region) -> None:
        self._allocator.free(region.span)

    def check_integrity(self) -> None:
        self._allocator.check_integrity()


class HostArena(SpanArena):
    """Base of arenas in host memory."""

    @asynccontextmanager
    async def lend(self, region: Region, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        assert region.buffer is not None
        yield region.buffer[offset : offset + nbytes]

    def prepare(self, region: Region, offset: int, nbytes: int) -> None:
        start = region.pointer + offset
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        populate_at(page, start + nbytes - page)

    def fill(self, region: Region, offset: int, lent: memoryview) -> None:
        """Do nothing: the bytes are in their place."""

    def copy_out(self, region: Region, offset: int, into: memoryview) -> None:
        assert region.buffer is not None
        copy_bytes(into, region.buffer[offset : offset + len(into)])

    @asynccontextmanager
    async def staging(self, nbytes: int) -> AsyncIterator[memoryview]:
        yield memoryview(bytearray(nbytes))

    def close(self) -> None:
        # Engines may hold views until garbage collection; the last one frees the mapping.
        self._memory = None


class CpuArena(HostArena):
    """The arena of a CPU node: separate anonymous memory, so that starts copy as they do to a GPU.

    A background thread pre-faults pages, so that neither the node's start nor an instance's first copy waits
    for them; a copy faults what is missing.
    """

    in_place = True

    def __init__(self, capacity_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, max(mmap.PAGESIZE, capacity_bytes))
        advise_huge(self._mapping)
        super().__init__("cpu", capacity_bytes, address_of(self._mapping), memoryview(self._mapping))
        self._closing = threading.Event()
        self._prefault = threading.Thread(target=self._populate, name="arena-prefault", daemon=True)
        self._prefault.start()

    def _populate(self) -> None:
        size = min(len(self._mapping), PREFAULT_BYTES)
        try:
            populate_gently(self._mapping, size, self._closing)
        except OSError as error:
            log.warning("arena: cannot pre-fault %d bytes, free memory is too small: %s", size, error)

    def close(self) -> None:
        self._closing.set()
        self._prefault.join()
        super().close()


def copy_bytes(into: memoryview, data: memoryview) -> None:
    """Copy `data`, without holding the GIL, unlike an assignment to a slice."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Size and duration of a copy to the device, without the time spent waiting for data."""

    nbytes: int
    busy_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.busy_s / 1e9 if self.busy_s else 0.0

    def to(self, device: str) -> str:
        """Describe the copy; there was none if the bytes arrived on the device."""
        return f"copied to {device} at {self.gb_per_s:.2f} GB/s" if self.busy_s else f"straight to {device}"
