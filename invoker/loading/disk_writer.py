"""The background copies of verified images to the disk tier, from host memory or the arena."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from invoker.loading.disk_cache import STEP_BYTES, DiskCache, DiskWrite
from invoker.loading.image_copies import ImageCopies, ImageCopy, OpenCopy
from invoker.loading.starts_first import StartsFirst
from rdmacast.aio.threads import run_in_thread

log = logging.getLogger("invoker.disk_writer")


class DiskWriter:
    """Writes verified images to the disk in the background; starts have precedence."""

    def __init__(self, disk: DiskCache, copies: ImageCopies, changed: Callable[[], None]) -> None:
        self._disk = disk
        self._copies = copies
        self._changed = changed
        self._queue: asyncio.Queue[tuple[str, ImageCopy]] = asyncio.Queue()
        self._pending: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<DiskWriter {self._queue.qsize()} queued>"

    def add(self, image: str, copy: ImageCopy) -> None:
        """Write this copy, which was verified as a whole."""
        self._pending[image] += 1
        self._queue.put_nowait((image, copy))

    def is_pending(self, image: str) -> bool:
        """Return whether the image is still to be written, or is being written."""
        return self._pending[image] > 0

    async def run(self, is_busy: Callable[[], bool]) -> None:
        """Write queued images, one at a time; never returns."""
        while True:
            image, copy = await self._queue.get()
            try:
                with self._copies.opened(image, copy) as source:
                    if source is not None:  # else it was evicted
                        await self._write(image, source, is_busy)
            except OSError as error:
                log.warning("image %s was not written to the disk: %s", image[:12], error)
            self._pending -= Counter((image,))
            self._changed()

    async def _write(self, image: str, source: OpenCopy, is_busy: Callable[[], bool]) -> None:
        started_s = time.monotonic()
        write = await run_in_thread(self._disk.begin, image, source.nbytes, undo=_abandon)
        if write is None:
            return
        starts, buffer = StartsFirst(is_busy), memoryview(bytearray(STEP_BYTES))
        try:
            while not write.is_complete:
                await starts.wait()
                await run_in_thread(write.step, source.read, buffer)
                if not source.is_here():
                    return  # it was evicted
            await run_in_thread(write.finish)
        finally:
            await run_in_thread(write.abandon)
        log.info("wrote image %s to the disk in %.1f s", image[:12], time.monotonic() - started_s)


def _abandon(late: DiskWrite | None) -> None:
    if late is not None:
        late.abandon()
