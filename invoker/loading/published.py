"""Images that this node serves to others, from host memory or the arena."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from invoker.host_tier.mapping import HostMapping, close_if_open
from invoker.host_tier.tier import HostTier
from invoker.loading.image_copies import ArenaImages
from rdmacast.aio.threads import run_in_thread
from rdmacast.bitfield import Bitfield, block_count
from rdmacast.errors import NotShared, RegionGone
from rdmacast.gpu_source import GpuSource, gpu_pointer
from rdmacast.server.region import GrowingRegion
from rdmacast.server.subscribers import Subscribers
from rdmacast.transport import RegionSource

IDLE_S = 5.0


class RegionPublisher(Protocol):
    """The part of rdmacast's RegionServer used here."""

    def publish(self, name: str, source: RegionSource) -> None: ...

    async def withdraw(self, name: str, drain_s: float) -> None: ...


class ImageRegion:
    """A RegionSource, HaveSource and GpuSource of one image: loading, in the host tier, or in the arena.

    The host copy is mapped, and so not evictable, while peers read it and for IDLE_S after, or until its room
    is needed. A view into the arena may be overwritten once the image is freed there: readers verify what
    they received.
    """

    def __init__(
        self,
        image: str,
        nbytes: int,
        tier: HostTier,
        arena: ArenaImages,
        check: Callable[[str, int], None] = lambda image, inode: None,
    ) -> None:
        self._check = check
        self._image = image
        self._nbytes = nbytes
        self._tier = tier
        self._arena = arena
        self._mapping: HostMapping | None = None
        self._last_used_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._views: dict[int, weakref.ref[memoryview]] = {}  # being read now
        self.loading: GrowingRegion | None = None
        self.peer_load: asyncio.Future[None] | None = None  # set while another process of the host loads it
        self._watch: AbstractContextManager[None] | None = None
        self._epoch = 0  # of the bitfield last reported to watchers
        self._reported_complete = False
        self._listeners = Subscribers()

    def __repr__(self) -> str:
        how = "loading" if self.loading else "mapped" if self._mapping else "idle"
        return f"<ImageRegion {self._image[:12]} {how}>"

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def shm_path(self) -> str | None:
        if self.loading is not None:
            return self.loading.shm_path
        return str(self._tier.directory / self._image) if self._tier.holds(self._image) else None

    def view(self, offset: int, nbytes: int) -> memoryview:
        if self.loading is not None:
            return self.loading.view(offset, nbytes)
        whole = self._view_of(self._mapping or self._tier.open(self._image))
        view = whole[offset : offset + nbytes]
        key = id(view)
        self._views[key] = weakref.ref(view, lambda _: self._views.pop(key, None))
        return view

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        """Return the range's address on a GPU if it is not in host memory."""
        if self.loading is not None:
            return gpu_pointer(self.loading, offset, nbytes)
        if self._mapping is not None:
            return None
        pointer = self._arena.gpu_pointer(self._image)
        return None if pointer is None else pointer + offset

    @asynccontextmanager
    async def staged(self, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        loading = self.loading
        lending = (
            loading.staged(offset, nbytes)
            if isinstance(loading, GpuSource)
            else self._arena.staged(self._image, offset, nbytes)
        )
        async with lending as copy:
            yield copy

    async def wait_for(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise RegionGone(f"[{offset}, {offset + nbytes}) is outside the image of {self._nbytes} bytes")
        if self.peer_load is not None:
            await asyncio.wait([self.peer_load])
        if self.loading is not None:
            await self.loading.wait_for(offset, nbytes)
        elif self._mapping is None:
            await self._map()

    def load_started(self, loading: GrowingRegion) -> None:
        """Serve the image from this process's load from now on."""
        self.loading = loading
        self._watch = loading.watch(self._listeners.notify)
        self._watch.__enter__()
        self._listeners.notify()

    def load_ended(self) -> None:
        """Stop serving from this process's load, whether it succeeded or not."""
        watch, self._watch, self.loading = self._watch, None, None
        if watch is not None:
            watch.__exit__(None, None, None)
        if not self._is_available():
            self._epoch += 1  # blocks reported as held are lost, or will be another copy's
        self._listeners.notify()

    def peer_load_started(self) -> None:
        """Let reads wait for the load of another process of the host."""
        self.peer_load = asyncio.get_running_loop().create_future()
        self._listeners.notify()

    def peer_load_ended(self) -> None:
        """End the wait for another process's load."""
        peer_load, self.peer_load = self.peer_load, None
        if peer_load is not None:
            peer_load.set_result(None)
        self._listeners.notify()

    def bitfield(self, block_bytes: int) -> Bitfield:
        reported = self._bitfield(block_bytes)
        is_complete = reported.held.bit_count() == reported.blocks
        if self._reported_complete and not is_complete:
            self._epoch += 1  # evicted: within one epoch, peers rely on reported blocks
        self._reported_complete = is_complete
        self._epoch = max(self._epoch, reported.epoch)
        return replace(reported, epoch=self._epoch)

    def watch(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        return self._listeners.subscribed(changed)

    def close_if_idle(self) -> None:
        """Close the mapping unless it is being read: a pull has several reads in flight."""
        if not self._views:
            self.close()

    def close(self) -> None:
        """Close the mapping. The region can be used again afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _bitfield(self, block_bytes: int) -> Bitfield:
        if self.loading is not None:
            return self.loading.bitfield(block_bytes)
        blocks = block_count(self._nbytes, block_bytes)
        everything, here = (1 << blocks) - 1, self._is_available()
        pending = everything if self.peer_load is not None and not here else 0
        return Bitfield(blocks=blocks, epoch=self._epoch, held=everything if here else 0, pending=pending)

    def _is_available(self) -> bool:
        """Return whether the whole image can be read now."""
        if self._mapping is not None or self._tier.holds(self._image):
            return True
        return self._arena.buffer(self._image) is not None or self._on_gpu

    @property
    def _on_gpu(self) -> bool:
        return self._arena.gpu_pointer(self._image) is not None

    async def _map(self) -> None:
        """Map the host copy in a thread, unless another reader has done so. Raises RegionGone."""
        mapping = await run_in_thread(self._tier.open, self._image, undo=close_if_open)
        if self._mapping is not None:
            close_if_open(mapping)
        elif mapping is not None or not self._on_gpu:
            self._view_of(mapping)

    def _view_of(self, mapping: HostMapping | None) -> memoryview:
        """Return a view of the image; `mapping` is kept until it has been idle. Raises RegionGone."""
        if mapping is None:
            buffer = self._arena.buffer(self._image)
            if buffer is None and self._on_gpu:
                raise NotShared(f"image {self._image[:12]} is in the memory of a GPU only")
            if buffer is None:
                raise RegionGone(f"image {self._image[:12]} is no longer on this node")
            return buffer.toreadonly()
        loop = asyncio.get_running_loop()
        if mapping is not self._mapping:
            self._check(self._image, mapping.inode)  # another node of this host may have loaded it
        self._mapping = mapping
        self._last_used_s = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._expire)
        return mapping.view

    def _expire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        left_s = self._last_used_s + IDLE_S - loop.time()
        if left_s > 0 or self._views:
            self._timer = loop.call_later(left_s if left_s > 0 else IDLE_S, self._expire)
        else:
            self.close()


class PublishedImages:
    """Publishes the node's images on its region server. Belongs to the event loop's thread."""

    def __init__(
        self,
        server: RegionPublisher,
        tier: HostTier,
        arena: ArenaImages,
        check: Callable[[str, int], None] = lambda image, inode: None,
    ) -> None:
        self._check = check
        self._server = server
        self._tier = tier
        self._arena = arena
        self._regions: dict[str, ImageRegion] = {}

    def __repr__(self) -> str:
        return f"<PublishedImages {list(self._regions.values())!r}>"

    def region(self, image: str, nbytes: int) -> ImageRegion:
        """Return the published region of an image that is cached or about to be loaded."""
        region = self._regions.get(image)
        if region is None:
            region = ImageRegion(image, nbytes, self._tier, self._arena, self._check)
            self._regions[image] = region
            self._server.publish(image, region)
        return region

    async def withdraw(self, image: str) -> None:
        """Serve no byte of an image any more; peers that read it are cut off."""
        region = self._regions.pop(image, None)
        if region is not None:
            await self._server.withdraw(image, 0.0)
            region.close()

    def release_mapping(self, image: str) -> None:
        """Close an image's mapping, so that it can be evicted."""
        if image in self._regions:
            self._regions[image].close()

    def release_idle_mappings(self) -> None:
        """Close mappings that are not being read, because their room may be needed."""
        for region in self._regions.values():
            region.close_if_idle()

    def publish_all(self, held: Mapping[str, int]) -> None:
        """Publish all cached images (digest and size).

        None is withdrawn: the region of an evicted image raises RegionGone, and serves again when it is
        reloaded.
        """
        for image, nbytes in held.items():
            self.region(image, nbytes)

    def close(self) -> None:
        """Close all mappings; the server is closed by its owner."""
        for region in self._regions.values():
            region.close()
