"""The check of whole images against their SHA-256, in the background.

Units are checked on arrival against errors, by checksums that a peer could forge. An image is its SHA-256.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable

from invoker.base.counters import Counters
from invoker.host_tier.tier import HostTier
from invoker.loading.starts_first import StartsFirst
from rdmacast.aio.threads import run_in_thread

STEP_BYTES = 4 << 20
_PAUSE_FACTOR = 3  # of a step's duration: a quarter of one core

Reject = Callable[[str, int], Awaitable[None]]

log = logging.getLogger("invoker.image_checks")


class ImageChecks:
    """The queue of images to check, each the file that this node maps: others of the host may replace it.

    One that is evicted first is not checked. `on_verified` receives genuine ones. Belongs to the event loop.
    """

    def __init__(
        self,
        tier: HostTier,
        counters: Counters,
        *,
        settle_s: float,
        on_verified: Callable[[str, int], None] = lambda image, inode: None,
    ) -> None:
        self._on_verified = on_verified
        self._tier = tier
        self._counters = counters
        self._settle_s = settle_s  # without a start, before a check begins
        self._queue: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self._queued: set[tuple[str, int]] = set()

    def __repr__(self) -> str:
        return f"<ImageChecks {len(self._queued)} queued>"

    def add(self, image: str, inode: int) -> None:
        """Check this file of the host tier, a complete image, unless that was done or will be."""
        if (image, inode) not in self._queued and not self._tier.is_verified(image, inode):
            self._queued.add((image, inode))
            self._queue.put_nowait((image, inode))

    async def run(self, is_busy: Callable[[], bool], reject: Reject) -> None:
        """Check queued images, one at a time; never returns. `reject` gets those that are not genuine.

        Starts have precedence, also over a check under way.
        """
        while True:
            image, inode = await self._queue.get()
            starts = StartsFirst(is_busy)
            await starts.wait(self._settle_s)
            self._queued.discard((image, inode))
            try:
                await self._check(image, inode, reject, starts)
            except OSError as error:
                log.warning("image %s could not be checked: %s", image[:12], error)
            except Exception:  # a bug: the others are to be checked
                log.exception("the check of image %s failed", image[:12])

    async def _check(self, image: str, inode: int, reject: Reject, starts: StartsFirst) -> None:
        found = await self._hash(image, inode, starts)
        if found == image:
            self._tier.mark_verified(image, inode)
            self._counters.images_verified += 1
            self._on_verified(image, inode)
            return
        # Only what no process maps is evicted, so a file that is gone and still used here was rejected.
        if found is None and not self._tier.is_rejected(image, inode):
            return
        self._counters.images_rejected += 1
        reason = f"it has the SHA-256 {found} here" if found else "another node of this host has found that"
        log.error("image %s is forged or damaged, and dropped: %s", image, reason)
        await reject(image, inode)

    async def _hash(self, image: str, inode: int, starts: StartsFirst) -> str | None:
        """Return the SHA-256; None if the file was removed, or another process has verified it."""
        fd = self._tier.open_file(image, inode)
        if fd is None:
            return None
        loop, sha, offset = asyncio.get_running_loop(), hashlib.sha256(), 0
        buffer = bytearray(STEP_BYTES)

        def step() -> int:
            count = os.preadv(fd, [buffer], offset)
            sha.update(memoryview(buffer)[:count])
            return count

        try:
            while True:
                await starts.wait()
                if not os.fstat(fd).st_nlink or self._tier.is_verified(image, inode):
                    return None
                started_s = loop.time()
                count = await run_in_thread(step)
                if not count:
                    return sha.hexdigest()
                offset += count
                await asyncio.sleep(_PAUSE_FACTOR * (loop.time() - started_s))
        finally:
            os.close(fd)
