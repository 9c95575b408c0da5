"""An image being filled: one buffer with its verified ranges, and the tasks and peers that wait for them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

from invoker.host_tier.mapping import release
from invoker.loading.unit_writer import UnitWriter
from rdmacast.server.region import GrowingRegion
from registry.images.manifest import UNIT_BYTES, Manifest

CHUNK_BYTES = 64 * UNIT_BYTES


class PartialImage(GrowingRegion):
    """A region that sources fill and that peers and the copy to the device read meanwhile.

    It is the BlockMemory and GpuSource of its writer: sources fill what that lends, and `mark` whole verified
    units that were kept; `on_progress` receives the verified bytes so far. Where only a part of an image is
    wanted, the other bytes count as present: no peer may read it. Belongs to the event loop's thread.
    """

    def __init__(self, writer: UnitWriter, manifest: Manifest, on_progress: Callable[[int], None]) -> None:
        path = writer.path
        super().__init__(writer.view, nbytes=manifest.nbytes, shm_path=None if path is None else str(path))
        start, size = writer.wanted(0, self.nbytes)
        super().mark(0, start)
        super().mark(start + size, self.nbytes - start - size)
        self.writer = writer
        self.manifest = manifest
        self.verified_bytes = 0
        self._on_progress = on_progress

    def __repr__(self) -> str:
        return f"<PartialImage {self.manifest.sha256[:12]} {self.verified_bytes} of {self.nbytes} bytes>"

    def wanted(self, offset: int, nbytes: int) -> tuple[int, int]:
        return self.writer.wanted(offset, nbytes)

    def lend(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        return self.writer.lend(offset, nbytes)

    async def keep(self, offset: int, view: memoryview) -> None:
        await self.writer.keep(offset, view)

    def close(self) -> None:
        """Keep the memory, at the end of a cast: other sources may fill what it has left."""

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        region = self.writer.region
        return None if region is None or region.buffer is not None else region.pointer + offset

    def staged(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        return self.writer.staged(offset, nbytes)

    def mark(self, offset: int, nbytes: int) -> int:
        """Mark `[offset, offset + nbytes)`, whole units, as verified; idempotent."""
        added = super().mark(offset, nbytes)
        self.verified_bytes += added
        self._on_progress(self.verified_bytes)
        return added

    def has(self, offset: int, nbytes: int) -> bool:
        """Return whether all units of the range are verified."""
        return self._have.covers(offset, offset + nbytes)

    def missing_chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the missing ranges, in order, as (offset, nbytes) of at most CHUNK_BYTES."""
        for start, end in self._have.missing(0, self.nbytes):
            for offset in range(start, end, CHUNK_BYTES):
                yield offset, min(CHUNK_BYTES, end - offset)

    def release(self) -> None:
        """Release the memory after the load; no view of it may be taken afterwards."""
        if self._view is not None:
            release(self._view)
        self.writer.abandon()
