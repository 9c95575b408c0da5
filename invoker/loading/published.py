"""Images that this node serves to others: from host memory, or from the arena."""

import asyncio
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from invoker.host_mapping import HostMapping, close_if_open
from invoker.host_tier import HostTier
from invoker.threads import in_thread
from rdmacast.errors import RegionGone
from rdmacast.have_map import HaveMap, blocks_of
from rdmacast.listeners import Listeners
from rdmacast.region import GrowingRegion
from rdmacast.transport import RegionSource

IDLE_S = 5.0


class Server(Protocol):
    """The part of rdmacast's RegionServer that is needed here."""

    def publish(self, name: str, source: RegionSource) -> None: ...


class ImageRegion:
    """A RegionSource, HaveSource and GpuSource for one image, wherever this node has it: arriving, in the
    host tier, in the arena. What only a GPU has, `have_map` does not tell: not everybody can read it there.

    The host copy is mapped (and so kept from eviction) while peers read it and for IDLE_S after, or
    until its room is needed. A view
    into the arena may be overwritten once the image is freed there: readers check what they received.
    """

    def __init__(
        self,
        image: str,
        nbytes: int,
        tier: HostTier,
        in_arena: Callable[[str], memoryview | None],
        on_gpu: Callable[[str], int | None] = lambda image: None,
    ) -> None:
        self._image = image
        self._nbytes = nbytes
        self._tier = tier
        self._in_arena = in_arena
        self._on_gpu = on_gpu
        self._mapping: HostMapping | None = None
        self._last_used_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._views: dict[int, weakref.ref[memoryview]] = {}  # those that are being read now
        self.arriving: GrowingRegion | None = None
        self.awaited: asyncio.Future[None] | None = None  # set while another process of the host loads it
        self._following: AbstractContextManager[None] | None = None
        self._epoch = 0  # of what watchers were told last
        self._told_whole = False
        self._listeners = Listeners()

    def __repr__(self) -> str:
        how = "arriving" if self.arriving else "mapped" if self._mapping else "idle"
        return f"<ImageRegion {self._image[:12]} {how}>"

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def shm_path(self) -> str | None:
        if self.arriving is not None:
            return self.arriving.shm_path
        return str(self._tier.directory / self._image) if self._tier.holds(self._image) else None

    def view(self, offset: int, nbytes: int) -> memoryview:
        if self.arriving is not None:
            return self.arriving.view(offset, nbytes)
        whole = self._whole(self._mapping or self._tier.open(self._image))
        view = whole[offset : offset + nbytes]
        key = id(view)
        self._views[key] = weakref.ref(view, lambda _: self._views.pop(key, None))
        return view

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        """Where the range is on a GPU, if it is nowhere else."""
        if self.arriving is not None or self._mapping is not None:
            return None
        pointer = self._on_gpu(self._image)
        return None if pointer is None else pointer + offset

    async def wait_for(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise RegionGone(f"[{offset}, {offset + nbytes}) is outside the image of {self._nbytes} bytes")
        if self.awaited is not None:
            await asyncio.wait([self.awaited])
        if self.arriving is not None:
            await self.arriving.wait_for(offset, nbytes)
        elif self._mapping is None:
            await self._map()

    def arrives(self, arriving: GrowingRegion) -> None:
        """The image is being loaded by this process."""
        self.arriving = arriving
        self._following = arriving.watch(self._listeners.tell)
        self._following.__enter__()
        self._listeners.tell()

    def arrived(self) -> None:
        """That load has ended, one way or the other."""
        following, self._following, self.arriving = self._following, None, None
        if following is not None:
            following.__exit__(None, None, None)
        if not self._is_here():
            self._epoch += 1  # what was told to be here is not, or will be another copy
        self._listeners.tell()

    def awaits(self) -> None:
        """Another process of the host is loading the image."""
        self.awaited = asyncio.get_running_loop().create_future()
        self._listeners.tell()

    def awaited_enough(self) -> None:
        """That process is not waited for any more."""
        awaited, self.awaited = self.awaited, None
        if awaited is not None:
            awaited.set_result(None)
        self._listeners.tell()

    def have_map(self, block_bytes: int) -> HaveMap:
        told = self._have_map(block_bytes)
        is_whole = told.held.bit_count() == told.blocks
        if self._told_whole and not is_whole:
            self._epoch += 1  # it was evicted: what was told under one epoch peers go by to its end
        self._told_whole = is_whole
        self._epoch = max(self._epoch, told.epoch)
        return replace(told, epoch=self._epoch)

    def watch(self, changed: Callable[[], None]) -> AbstractContextManager[None]:
        return self._listeners.added(changed)

    def close_if_idle(self) -> None:
        """Let go of the mapping unless somebody is reading it: a pull has several reads under way."""
        if not self._views:
            self.close()

    def close(self) -> None:
        """Let go of the mapping. The region can be used again after it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _have_map(self, block_bytes: int) -> HaveMap:
        if self.arriving is not None:
            return self.arriving.have_map(block_bytes)
        blocks = blocks_of(self._nbytes, block_bytes)
        everything, here = (1 << blocks) - 1, self._is_here()
        coming = everything if self.awaited is not None and not here else 0
        return HaveMap(blocks=blocks, epoch=self._epoch, held=everything if here else 0, coming=coming)

    def _is_here(self) -> bool:
        """Whether all of it can be read now."""
        if self._mapping is not None or self._tier.holds(self._image):
            return True
        return self._in_arena(self._image) is not None

    async def _map(self) -> None:
        """Map the host copy off the event loop, unless another reader is faster. Raises RegionGone."""
        mapping = await in_thread(self._tier.open, self._image, undo=close_if_open)
        if self._mapping is not None:
            close_if_open(mapping)
        elif mapping is not None or self._on_gpu(self._image) is None:
            self._whole(mapping)

    def _whole(self, mapping: HostMapping | None) -> memoryview:
        """All bytes of the image; `mapping` is remembered until it has been idle. Raises RegionGone."""
        if mapping is None:
            buffer = self._in_arena(self._image)
            if buffer is None:
                raise RegionGone(f"image {self._image[:12]} is no longer here")
            return buffer.toreadonly()
        loop = asyncio.get_running_loop()
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
    """Keeps the region server in step with what the node holds. Belongs to the event loop's thread."""

    def __init__(
        self,
        server: Server,
        tier: HostTier,
        in_arena: Callable[[str], memoryview | None],
        on_gpu: Callable[[str], int | None] = lambda image: None,
    ) -> None:
        self._server = server
        self._tier = tier
        self._in_arena = in_arena
        self._on_gpu = on_gpu
        self._regions: dict[str, ImageRegion] = {}

    def __repr__(self) -> str:
        return f"<PublishedImages {list(self._regions.values())!r}>"

    def region(self, image: str, nbytes: int) -> ImageRegion:
        """The published region of an image that is here or about to arrive."""
        region = self._regions.get(image)
        if region is None:
            region = ImageRegion(image, nbytes, self._tier, self._in_arena, self._on_gpu)
            self._regions[image] = region
            self._server.publish(image, region)
        return region

    def idle(self, image: str) -> None:
        """Stop holding an image's mapping, so that it can be evicted."""
        if image in self._regions:
            self._regions[image].close()

    def make_way(self) -> None:
        """Stop holding the mappings that nobody reads, since their room may be needed."""
        for region in self._regions.values():
            region.close_if_idle()

    def publish_all(self, held: Mapping[str, int]) -> None:
        """Publish every held image (digest and size).

        None is ever withdrawn: the region of an image that is gone answers RegionGone by itself, and
        serves again when the image comes back.
        """
        for image, nbytes in held.items():
            self.region(image, nbytes)

    def close(self) -> None:
        """Let go of all mappings; the server is closed by its owner."""
        for region in self._regions.values():
            region.close()
