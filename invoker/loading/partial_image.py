"""An image being filled: one buffer with its verified ranges, and the tasks and peers that wait for them."""

from collections.abc import Callable, Iterator

from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.mapping import release
from rdmacast.server.region import GrowingRegion
from registry.images.manifest import UNIT_BYTES, Manifest

CHUNK_BYTES = 64 * UNIT_BYTES


class PartialImage(GrowingRegion):
    """A region that sources fill and that peers and the copy to the device read meanwhile.

    Sources write to `buffer` and `mark` whole verified units; `on_progress` receives the verified bytes so
    far. Of an image of which only the bytes `wanted` are to be filled, the others count as present: no peer
    may read it. Belongs to the event loop's thread.
    """

    def __init__(
        self,
        writer: ImageWriter,
        manifest: Manifest,
        on_progress: Callable[[int], None],
        wanted: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(writer.view, shm_path=str(writer.path))
        if wanted is not None:
            start, end = wanted
            super().mark(0, start)
            super().mark(end, self.nbytes - end)
        self.writer = writer
        self.manifest = manifest
        self.verified_bytes = 0
        self._on_progress = on_progress

    def __repr__(self) -> str:
        return f"<PartialImage {self.manifest.sha256[:12]} {self.verified_bytes} of {self.nbytes} bytes>"

    def buffer(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable view of a range."""
        return self.writer.view[offset : offset + nbytes]

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
        release(self._view)
        self.writer.abandon()
