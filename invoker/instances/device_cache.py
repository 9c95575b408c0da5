"""The cache of images on the accelerator: users, reservations and eviction."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from functools import partial

from invoker.base.errors import InvokerError, OutOfDeviceMemory
from invoker.engine.kv.budget import kv_cache_bytes
from invoker.loading.image_copies import ReadArena
from invoker.memory.arena import Arena, Region
from rdmacast.aio.groups import cancel_and_discard
from rdmacast.aio.threads import run_in_thread
from rdmacast.errors import RegionGone
from registry.clock import Clock
from registry.errors import CorruptImage

Copying = Callable[[], Coroutine[None, None, None]]

log = logging.getLogger("invoker.device_cache")


class DeviceImageState(StrEnum):
    LOADING = "loading"  # one user fills the region
    COMPLETE = "complete"  # instances may bind to it
    PART = "part"  # layers of one member of a group: of no use to others, and freed with it
    REMOVED = "removed"  # its load failed, or it was freed


class DeviceImage:
    """One image in the arena; modified by DeviceCache only."""

    def __init__(self, image: str, region: Region, now_s: float) -> None:
        self.image = image
        self.region = region
        self.state = DeviceImageState.LOADING
        self.users = 1
        self.last_used_s = now_s
        self.settled: asyncio.Event = asyncio.Event()
        self.expiry: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<DeviceImage {self.image[:12]} {self.state} users={self.users}>"


class DeviceCache:
    """The images in an arena. Belongs to the event loop's thread.

    Each `acquire`, `reserve` and `reserve_part` is paired with one `release`. An image without users is freed
    `keep_hot_s` after its last use, or earlier if its room is needed. `used` is called with the image at the
    end of each use, so that its copy in host memory is as recent. Before an image that was not used for so
    long is freed, it is copied to host memory: `demotion` returns the copying, or None if none is needed. Its
    room may be needed earlier.
    """

    def __init__(
        self,
        arena: Arena,
        keep_hot_s: float,
        clock: Clock,
        changed: Callable[[], None],
        used: Callable[[str], None],
        demotion: Callable[[str], Copying | None] = lambda _: None,
    ) -> None:
        self._demotion = demotion
        self._demoting: dict[DeviceImage, asyncio.Task[None]] = {}
        self._arena = arena
        self._keep_hot_s = keep_hot_s
        self._clock = clock
        self._changed = changed
        self._used = used
        self._by_image: dict[str, DeviceImage] = {}
        self.evictions = 0

    def __repr__(self) -> str:
        return f"<DeviceCache {list(self._by_image.values())!r}>"

    def complete(self) -> list[DeviceImage]:
        """Return the complete images."""
        return [one for one in self._by_image.values() if one.state is DeviceImageState.COMPLETE]

    def holds(self, image: str) -> bool:
        found = self._by_image.get(image)
        return found is not None and found.state is DeviceImageState.COMPLETE

    @property
    def largest_room_bytes(self) -> int:
        """The largest range without images and caches that are in use."""
        return self._arena.largest_if_freed(one.region for one in self._idle())

    def region(self, image: str) -> Region | None:
        """Return the region of a complete image."""
        return self._by_image[image].region if self.holds(image) else None

    def buffer(self, image: str) -> memoryview | None:
        """Return the bytes of a complete image if the CPU can address them, else None."""
        region = self.region(image)
        return None if region is None else region.buffer

    def gpu_pointer(self, image: str) -> int | None:
        """Return the device address of a complete image if the CPU cannot address it, else None."""
        region = self.region(image)
        return None if region is None or region.buffer is not None else region.pointer

    def reader(self, image: str) -> ReadArena | None:
        """Return the reading of a complete image; once it is freed here, that reads other bytes."""
        region = self.region(image)
        return None if region is None else partial(self._arena.copy_out, region)

    @asynccontextmanager
    async def staged(self, image: str, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        """Lend a copy of a range of a complete image in host memory. Raises RegionGone."""
        async with self._arena.staging(nbytes) as into:
            region = self.region(image)
            if region is None:
                raise RegionGone(f"image {image[:12]} has left the arena")
            await run_in_thread(self._arena.copy_out, region, offset, into)
            yield into

    def acquire(self, image: str) -> DeviceImage | None:
        """Use a complete image, or one that is loading (await its `settled`); None if it is not cached."""
        found = self._by_image.get(image)
        if found is None:
            return None
        found.users += 1
        self._stop_expiry(found)
        return found

    def reserve(self, image: str, nbytes: int) -> DeviceImage:
        """Reserve a region for an image that is not cached. Raises OutOfDeviceMemory."""
        assert image not in self._by_image, f"{image} is cached already"
        device_image = DeviceImage(image, self.reserve_region(nbytes), self._clock.monotonic_s())
        self._by_image[image] = device_image
        return device_image

    def reserve_part(self, image: str, nbytes: int) -> DeviceImage:
        """Reserve a region for a part of an image, for one instance alone. Raises OutOfDeviceMemory."""
        part = DeviceImage(image, self.reserve_region(nbytes), self._clock.monotonic_s())
        part.state = DeviceImageState.PART
        return part

    def reserve_region(self, nbytes: int, *, at_end: bool = False) -> Region:
        """Reserve a region, evicting idle images, least recently used first. Raises OutOfDeviceMemory.

        Images begin at the start of the arena, and what has other sizes `at_end`: images are alike in size,
        and so leave holes in which others fit.
        """
        while True:
            try:
                region = self._arena.reserve(nbytes, at_end=at_end)
            except OutOfDeviceMemory:
                idle = self._idle()
                if not idle or nbytes > self.largest_room_bytes:
                    raise
                self.evictions += 1
                log.info("image %s: evicted from the arena", idle[0].image[:12])
                self._free(idle[0])
            else:
                self._changed()
                return region

    def reserve_kv(self, min_bytes: int, wanted_bytes: int) -> Region:
        """Reserve a region for K and V, smaller than wanted if little room is left.

        Idle images count as free, and those are evicted whose place it takes. Raises OutOfDeviceMemory.
        """
        nbytes = kv_cache_bytes(
            min_bytes=min_bytes,
            wanted_bytes=wanted_bytes,
            room_bytes=self._arena.free_bytes + sum(one.region.span.nbytes for one in self._idle()),
            largest_room_bytes=self.largest_room_bytes,
        )
        return self.reserve_region(nbytes, at_end=True)

    @contextmanager
    def kv_region(self, min_bytes: int, wanted_bytes: int) -> Iterator[Region]:
        """Hold such a region while the block lasts. Raises OutOfDeviceMemory."""
        region = self.reserve_kv(min_bytes, wanted_bytes)
        try:
            yield region
        finally:
            self.free_region(region)

    def free_region(self, region: Region) -> None:
        """Free a region from `reserve_region` or `reserve_kv`."""
        self._arena.free(region)
        self._changed()

    def settle(self, device_image: DeviceImage, *, loaded: bool) -> None:
        """End the load of a reserved image and wake those waiting for it."""
        device_image.state = DeviceImageState.COMPLETE if loaded else DeviceImageState.REMOVED
        if not loaded:
            del self._by_image[device_image.image]
        device_image.settled.set()
        self._changed()

    def release(self, device_image: DeviceImage) -> None:
        """End one use of an image."""
        assert device_image.users > 0, f"{device_image} is not in use"
        device_image.users -= 1
        device_image.last_used_s = self._clock.monotonic_s()
        self._used(device_image.image)
        if device_image.users:
            return
        if device_image.state is not DeviceImageState.COMPLETE:
            self._free(device_image)
        elif self._keep_hot_s > 0:
            loop = asyncio.get_running_loop()
            device_image.expiry = loop.call_later(self._keep_hot_s, self._expire, device_image)
            self._changed()
        else:
            self._expire(device_image)

    def drop(self, image: str) -> bool:
        """Free an idle image now; return False if it is in use or not cached."""
        found = self._by_image.get(image)
        if found is None or found.users:
            return False
        self._free(found)
        return True

    def reject(self, image: str) -> None:
        """Let no instance use a complete image any more; its memory is freed after its last user."""
        found = self._by_image.get(image)
        if found is None or found.state is not DeviceImageState.COMPLETE:
            return  # the load in progress is cancelled with its instance
        if found in self._demoting:
            self._demoting[found].cancel()
        if not found.users:
            self._free(found)
            return
        del self._by_image[image]
        found.state = DeviceImageState.REMOVED
        self._changed()

    async def aclose(self) -> None:
        """End the copies to host memory, and start no more."""
        for device_image in self._by_image.values():
            self._stop_expiry(device_image)
        await cancel_and_discard(*self._demoting.values())

    def _expire(self, device_image: DeviceImage) -> None:
        """Free an image that was not used for long, after it was copied to host memory."""
        device_image.expiry = None
        if device_image in self._demoting:
            return  # freed at the end of that copying
        copying = self._demotion(device_image.image)
        if copying is None:
            self._free(device_image)
            return
        task = asyncio.create_task(self._copy(device_image.image, copying), name="demote")
        self._demoting[device_image] = task
        task.add_done_callback(lambda _: self._copied(device_image))

    async def _copy(self, image: str, copying: Copying) -> None:
        try:
            await copying()
        except (InvokerError, CorruptImage, OSError) as error:
            log.warning("image %s: not copied to host memory: %s", image[:12], error)

    def _copied(self, device_image: DeviceImage) -> None:
        """Free an image after its copying, successful or not, unless it was used meanwhile."""
        del self._demoting[device_image]
        is_idle = not device_image.users and device_image.expiry is None
        if is_idle and device_image.state is DeviceImageState.COMPLETE:
            self._free(device_image)

    def _idle(self) -> list[DeviceImage]:
        idle = [one for one in self._by_image.values() if not one.users]
        return sorted(idle, key=lambda one: one.last_used_s)

    def _free(self, device_image: DeviceImage) -> None:
        self._stop_expiry(device_image)
        if self._by_image.get(device_image.image) is device_image:
            del self._by_image[device_image.image]
        device_image.state = DeviceImageState.REMOVED
        self._arena.free(device_image.region)
        self._changed()

    def _stop_expiry(self, device_image: DeviceImage) -> None:
        if device_image.expiry is not None:
            device_image.expiry.cancel()
            device_image.expiry = None
