"""The check of whole images against their SHA-256, in the background.

Units are checked on arrival against errors, by checksums that a peer could forge. An image is its SHA-256.
Checked are files of the host tier, and what arrived in the arena itself.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from invoker.base.counters import Counters
from invoker.host_tier.tier import HostTier
from invoker.loading.image_copies import ImageCopies, ImageCopy
from invoker.loading.starts_first import StartsFirst
from rdmacast.aio.threads import run_in_thread

STEP_BYTES = 4 << 20
_PAUSE_FACTOR = 3  # of a step's duration: a quarter of one core

Reject = Callable[[str, ImageCopy], Awaitable[None]]

log = logging.getLogger("invoker.image_checks")


class ImageChecks:
    """The queue of copies to check; of files those that this node maps: others of the host may replace them.

    One that is evicted first is not checked. `on_verified` receives genuine ones. Belongs to the event loop.
    """

    def __init__(
        self,
        tier: HostTier,
        copies: ImageCopies,
        counters: Counters,
        *,
        settle_s: float,
        on_verified: Callable[[str, ImageCopy], None] = lambda image, copy: None,
    ) -> None:
        self._on_verified = on_verified
        self._tier = tier
        self._copies = copies
        self._counters = counters
        self._settle_s = settle_s  # without a start, before a check begins
        self._queue: asyncio.Queue[tuple[str, ImageCopy]] = asyncio.Queue()
        self._queued: set[tuple[str, ImageCopy]] = set()

    def __repr__(self) -> str:
        return f"<ImageChecks {len(self._queued)} queued>"

    def add(self, image: str, copy: ImageCopy) -> None:
        """Check this copy, a complete image, unless that was done or will be."""
        if (image, copy) not in self._queued and not self._is_verified(image, copy):
            self._queued.add((image, copy))
            self._queue.put_nowait((image, copy))

    async def run(self, is_busy: Callable[[], bool], reject: Reject) -> None:
        """Check queued images, one at a time; never returns. `reject` gets those that are not genuine.

        Starts have precedence, also over a check under way.
        """
        while True:
            image, copy = await self._queue.get()
            starts = StartsFirst(is_busy)
            await starts.wait(self._settle_s)
            self._queued.discard((image, copy))
            try:
                await self._check(image, copy, reject, starts)
            except OSError as error:
                log.warning("image %s could not be checked: %s", image[:12], error)
            except Exception:  # a bug: the others are to be checked
                log.exception("the check of image %s failed", image[:12])

    async def _check(self, image: str, copy: ImageCopy, reject: Reject, starts: StartsFirst) -> None:
        found = await self._hash(image, copy, starts)
        if found == image:
            if isinstance(copy, int):
                self._tier.mark_verified(image, copy)
            self._counters.images_verified += 1
            self._on_verified(image, copy)
            return
        # Only what no process maps is evicted, so a file that is gone and still used here was rejected.
        if found is None and not (isinstance(copy, int) and self._tier.is_rejected(image, copy)):
            return
        self._counters.images_rejected += 1
        reason = f"it has the SHA-256 {found} here" if found else "another node of this host has found that"
        log.error("image %s is forged or damaged, and dropped: %s", image, reason)
        await reject(image, copy)

    def _is_verified(self, image: str, copy: ImageCopy) -> bool:
        """Return whether a process of the host has verified it; an arena is of one process."""
        return isinstance(copy, int) and self._tier.is_verified(image, copy)

    async def _hash(self, image: str, copy: ImageCopy, starts: StartsFirst) -> str | None:
        """Return the SHA-256; None if the copy was removed, or another process has verified it."""
        loop, sha, offset = asyncio.get_running_loop(), hashlib.sha256(), 0
        buffer = memoryview(bytearray(STEP_BYTES))
        with self._copies.opened(image, copy) as opened:
            if opened is None:
                return None

            def step() -> int:
                count = opened.read(offset, buffer)
                sha.update(buffer[:count])
                return count

            while True:
                await starts.wait()
                if not opened.is_here() or self._is_verified(image, copy):
                    return None
                started_s = loop.time()
                count = await run_in_thread(step)
                if not opened.is_here():
                    return None
                if not count:
                    return sha.hexdigest()
                offset += count
                await asyncio.sleep(_PAUSE_FACTOR * (loop.time() - started_s))
