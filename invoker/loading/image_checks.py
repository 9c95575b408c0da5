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
from rdmacast.aio.threads import run_in_thread

STEP_BYTES = 4 << 20
SETTLE_S = 5.0  # without a start, before a check begins
_PAUSE_FACTOR = 3  # of a step's duration: a quarter of one core
_MAX_WAIT_S = 60.0  # of an image, for starts of this node: a node that always starts something checks, too
_WAIT_S = 0.05

log = logging.getLogger("invoker.image_checks")


class ImageChecks:
    """The queue of images to check; one that is evicted first is not checked. Belongs to the event loop."""

    def __init__(self, tier: HostTier, counters: Counters) -> None:
        self._tier = tier
        self._counters = counters
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._is_starting: Callable[[], bool] = lambda: False
        self._waited_s = 0.0  # of the image being checked

    def __repr__(self) -> str:
        return f"<ImageChecks {len(self._queued)} queued>"

    def add(self, image: str) -> None:
        """Check a complete image of the host tier, unless that was done or will be."""
        if image not in self._queued and not self._tier.is_verified(image):
            self._queued.add(image)
            self._queue.put_nowait(image)

    async def run(self, is_starting: Callable[[], bool], reject: Callable[[str], Awaitable[None]]) -> None:
        """Check queued images, one at a time; never returns. `reject` gets those that are not genuine.

        Starts have precedence, also over a check under way.
        """
        self._is_starting = is_starting
        while True:
            image = await self._queue.get()
            self._waited_s = quiet_s = 0.0
            while quiet_s < SETTLE_S and self._waited_s < _MAX_WAIT_S:
                quiet_s = 0.0 if is_starting() else quiet_s + _WAIT_S
                await self._wait()
            self._queued.discard(image)
            try:
                await self._check(image, reject)
            except OSError as error:
                log.warning("image %s could not be checked: %s", image[:12], error)
            except Exception:  # a bug: the others are to be checked
                log.exception("the check of image %s failed", image[:12])

    async def _wait(self) -> None:
        self._waited_s += _WAIT_S
        await asyncio.sleep(_WAIT_S)

    async def _check(self, image: str, reject: Callable[[str], Awaitable[None]]) -> None:
        fd = self._tier.open_file(image)
        if fd is None:
            return
        try:
            found = await self._hash(image, fd)
            if found is None:
                return
            if found == image:
                self._tier.mark_verified(image, os.fstat(fd).st_ino)
                self._counters.images_verified += 1
                return
        finally:
            os.close(fd)
        self._counters.images_rejected += 1
        log.error("image %s has the SHA-256 %s here: it is forged or damaged, and dropped", image, found)
        await reject(image)

    async def _hash(self, image: str, fd: int) -> str | None:
        """Return the SHA-256; None if the image was evicted, or another process has verified it."""
        loop, sha, offset = asyncio.get_running_loop(), hashlib.sha256(), 0
        buffer = bytearray(STEP_BYTES)

        def step() -> int:
            count = os.preadv(fd, [buffer], offset)
            sha.update(memoryview(buffer)[:count])
            return count

        while os.fstat(fd).st_nlink and not self._tier.is_verified(image):
            if self._is_starting() and self._waited_s < _MAX_WAIT_S:
                await self._wait()
                continue
            started_s = loop.time()
            count = await run_in_thread(step)
            if not count:
                return sha.hexdigest()
            offset += count
            await asyncio.sleep(_PAUSE_FACTOR * (loop.time() - started_s))
        return None
