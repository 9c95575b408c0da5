"""The background copies of verified images from host memory to the disk tier."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable

from invoker.host_tier.tier import HostTier
from invoker.loading.disk_cache import DiskCache, DiskWrite
from invoker.loading.starts_first import StartsFirst
from rdmacast.aio.threads import run_in_thread

log = logging.getLogger("invoker.disk_writer")


class DiskWriter:
    """Writes verified images of the host tier to the disk in the background; starts have precedence."""

    def __init__(self, disk: DiskCache, tier: HostTier, changed: Callable[[], None]) -> None:
        self._disk = disk
        self._tier = tier
        self._changed = changed
        self._queue: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self._pending: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<DiskWriter {self._queue.qsize()} queued>"

    def add(self, image: str, inode: int) -> None:
        """Write this file of the host tier, which was verified as a whole."""
        self._pending[image] += 1
        self._queue.put_nowait((image, inode))

    def is_pending(self, image: str) -> bool:
        """Return whether the image is still to be written, or is being written."""
        return self._pending[image] > 0

    async def run(self, is_busy: Callable[[], bool]) -> None:
        """Write queued images, one at a time; never returns."""
        while True:
            image, inode = await self._queue.get()
            try:
                await self._write(image, inode, is_busy)
            except OSError as error:
                log.warning("image %s was not written to the disk: %s", image[:12], error)
            self._pending -= Counter((image,))
            self._changed()

    async def _write(self, image: str, inode: int, is_busy: Callable[[], bool]) -> None:
        source = self._tier.open_file(image, inode)
        if source is None:
            return  # it was evicted
        try:
            started_s = time.monotonic()
            write = await run_in_thread(self._disk.begin, image, os.fstat(source).st_size, undo=_abandon)
            if write is None:
                return
            starts = StartsFirst(is_busy)
            try:
                while not write.is_complete:
                    await starts.wait()
                    await run_in_thread(write.step, source)
                await run_in_thread(write.finish)
            finally:
                await run_in_thread(write.abandon)
        finally:
            os.close(source)
        log.info("wrote image %s to the disk in %.1f s", image[:12], time.monotonic() - started_s)


def _abandon(late: DiskWrite | None) -> None:
    if late is not None:
        late.abandon()
