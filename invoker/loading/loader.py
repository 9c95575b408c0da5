"""Loads images into the host tier, once for all concurrent users, which can read it as it arrives."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from invoker.base.counters import Counters
from invoker.base.errors import HostTierFull, StartFailed
from invoker.host_tier.image_writer import ImageWriter, LoadElsewhere
from invoker.host_tier.mapping import close_if_open, release
from invoker.host_tier.tier import HostTier
from invoker.loading.arrival import ImageArrival, ImageLoad, MappedImage, release_views
from invoker.loading.cast_fetch import report_present
from invoker.loading.fetch import from_memory
from invoker.loading.fetch_order import FetchOrder, LoadSources
from invoker.loading.origins import Origins, node_origin
from invoker.loading.part_load import part_load
from invoker.loading.partial_image import PartialImage
from invoker.loading.progress import Progress
from invoker.loading.published import PublishedImages
from invoker.loading.sources import choose_peers
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.threads import run_in_daemon_thread, run_in_thread
from registry.errors import CorruptImage
from registry.images.codec import MAX_MANIFEST_BYTES, decode_manifest
from registry.images.manifest import Manifest
from registry.messages.images import ImageRef
from registry.records.instance import StartKind

_MANIFESTS_KEPT = 64


class ImageLoader:
    """Loads images for one node. Belongs to the event loop's thread."""

    def __init__(
        self,
        sources: LoadSources,
        tier: HostTier,
        published: PublishedImages,
        counters: Counters,
        changed: Callable[[], None],
        check: Callable[[str, int], None] = lambda image, inode: None,
    ) -> None:
        self._check = check
        self._sources = sources
        self._origins = Origins()
        self._fetches = FetchOrder(sources, self._origins, counters)
        self._tier = tier
        self._published = published
        self._changed = changed
        self._loads: dict[str, ImageLoad] = {}
        # Each lock is kept alive by the callers that hold or wait for it.
        self._entering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._manifests: dict[str, Manifest] = {}

    def __repr__(self) -> str:
        return f"<ImageLoader {list(self._loads.values())!r} entering={len(self._entering)}>"

    @property
    def reads_store(self) -> bool:
        return self._sources.store is not None

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def arriving(self) -> list[PartialImage]:
        """Return the images that are being filled."""
        return [load.target for load in self._loads.values() if not load.is_complete]

    def distrust(self, image: str, inode: int) -> None:
        """Take the image no more from where this file of it came from, but from the store if possible."""
        store = self._sources.store
        self._origins.distrust(image, inode, None if store is None else store.label)

    async def manifest(self, ref: ImageRef) -> Manifest:
        """Return the image's manifest, from the request or the store, verified.

        Raises CorruptImage, StoreError.
        """
        known = self._manifests.get(ref.manifest)
        if known is not None and known.sha256 == ref.image:
            return known
        encoded = ref.manifest_bytes
        if not encoded:
            if self._sources.store is None:
                raise StartFailed(f"no manifest came with image {ref.image} and this node reads no store")
            encoded = await self._sources.store.store.read(ref.manifest, limit=MAX_MANIFEST_BYTES)
        if hashlib.sha256(encoded).hexdigest() != ref.manifest:
            raise CorruptImage(f"the manifest of image {ref.image} does not match its digest {ref.manifest}")
        manifest = await run_in_thread(decode_manifest, encoded)
        if manifest.sha256 != ref.image or manifest.nbytes != ref.nbytes:
            raise CorruptImage(f"manifest {ref.manifest} is not that of image {ref.image}")
        while len(self._manifests) >= _MANIFESTS_KEPT:
            del self._manifests[next(iter(self._manifests))]
        self._manifests[ref.manifest] = manifest
        return manifest

    @asynccontextmanager
    async def open_image(
        self, ref: ImageRef, manifest: Manifest, progress: Progress, *, yielding: bool = False
    ) -> AsyncIterator[ImageArrival]:
        """Open an image in the host tier, loading it if necessary; it may still be loading when this yields.

        A load is shared by its users and cancelled when the last one leaves. A `yielding` one does not evict
        retained images. Raises StartFailed with each source's failure, or HostTierFull.
        """
        load = await self._enter(ref, manifest, yielding=yielding)
        if isinstance(load, MappedImage):
            self._report_present(ref)
            try:
                progress(1.0)
                yield load
            finally:
                release(load.view)
                load.mapping.close()
            return
        load.watchers.append(progress)
        try:
            yield load
        finally:
            load.watchers.remove(progress)
            if load.is_complete:
                self._report_present(ref, load.casts)
            load.users -= 1
            if not load.users:
                await self._leave(load)

    @asynccontextmanager
    async def open_part(
        self, ref: ImageRef, manifest: Manifest, wanted: tuple[int, int], progress: Progress
    ) -> AsyncIterator[ImageArrival]:
        """Open the bytes `wanted` of an image, whole units; only these may be read.

        They are read from the host tier where that has the image or receives it by this node, else loaded
        into memory of this process. Raises what `open_image` does, and OSError.
        """
        if ref.image in self._loads or await run_in_thread(self._tier.holds, ref.image):
            whole = msgspec.structs.replace(ref, cast=None)
            async with self.open_image(whole, manifest, progress) as arrival:
                yield arrival
            return
        peers = choose_peers(ref.holders, node=self._sources.node, host=self._sources.host)
        begin = partial(self._tier.begin_part, ref.image, ref.nbytes)
        async with part_load(ref, manifest, wanted, begin, peers, self._fetches, progress) as load:
            yield load

    def demotion(self, image: str) -> Callable[[], Coroutine[None, None, None]] | None:
        """Return the copying of an image from the arena to the host tier.

        None if the tier holds it, or lacks room without evicting another. The copying raises HostTierError,
        and StartFailed or CorruptImage if the image leaves the arena meanwhile.
        """
        manifest = next((one for one in self._manifests.values() if one.sha256 == image), None)
        if manifest is None or image in self._loads or self._tier.holds(image):
            return None
        if self._tier.limit_bytes - self._tier.used_bytes() < manifest.nbytes:
            return None
        return partial(self._copy_from_arena, image, manifest)

    async def _copy_from_arena(self, image: str, manifest: Manifest) -> None:
        async with self._entering.setdefault(image, asyncio.Lock()):
            if image in self._loads:
                return
            begin = partial(self._tier.begin, image, manifest.nbytes, yielding=True)
            started = await run_in_thread(begin, undo=_discard)
            if not isinstance(started, ImageWriter):
                _discard(started)
                return
            target = PartialImage(started, manifest, lambda nbytes: None)
            load = ImageLoad([], "arena", target)
            self._loads[image] = load
            load.origins.add("arena")
            self._run(load, f"demote {image[:12]}", partial(self._from_arena, target))
        try:
            await load.complete()
        finally:
            await self._leave(load)

    def _report_present(self, ref: ImageRef, reported: Collection[str] = ()) -> None:
        """Publish the completion of the image's cast if it was loaded another way."""
        cast, cast_context = ref.cast, self._sources.casts
        if (
            cast is None
            or cast_context is None
            or cast.cast_id in reported
            or not cast.has_target(self._sources.node)
        ):
            return
        report_present(cast, cast_context)

    async def _enter(self, ref: ImageRef, manifest: Manifest, *, yielding: bool) -> MappedImage | ImageLoad:
        """Return the mapped image, or its load with one more user."""
        lock = self._entering.setdefault(ref.image, asyncio.Lock())
        waited = False
        async with lock:
            while True:
                load = self._loads.get(ref.image)
                if load is not None and load.users:
                    load.users += 1
                    return load
                if load is not None:  # its last user left: it is being cancelled; or it has no users
                    await asyncio.wait([load.task])
                    continue
                mapping = await run_in_thread(self._tier.open, ref.image, undo=close_if_open)
                if mapping is not None:
                    # Peers may use this copy before the node's next record lists it.
                    self._published.region(ref.image, ref.nbytes)
                    self._check(ref.image, mapping.inode)
                    # After waiting for another process's load, the image was not here at the start.
                    return MappedImage(StartKind.COLD if waited else StartKind.WARM, mapping)
                self._published.release_idle_mappings()
                begin = partial(self._tier.begin, ref.image, ref.nbytes, yielding=yielding)
                try:
                    started = await run_in_thread(begin, undo=_discard)
                except HostTierFull:
                    unused = [one.task for one in self._loads.values() if not one.users]
                    if not unused:
                        raise
                    await asyncio.wait(unused)  # copies from the arena, which may be evicted then
                    continue
                if isinstance(started, ImageWriter):
                    return self._start_load(ref, manifest, started)
                if isinstance(started, LoadElsewhere):
                    waited = True
                    await self._wait(ref, started)

    async def _wait(self, ref: ImageRef, elsewhere: LoadElsewhere) -> None:
        """Wait for another process's load; peers' reads from this node wait too."""
        region = self._published.region(ref.image, ref.nbytes)
        region.peer_load_started()
        try:
            await run_in_daemon_thread(self._tier.wait, elsewhere)
        finally:
            region.peer_load_ended()

    def _start_load(self, ref: ImageRef, manifest: Manifest, writer: ImageWriter) -> ImageLoad:
        peers = choose_peers(ref.holders, node=self._sources.node, host=self._sources.host)
        source = node_origin(peers[0].node) if peers else "store" if self.reads_store else ""
        # Late binding: the load is constructed from its target.
        target = PartialImage(writer, manifest, lambda nbytes: self._on_progress(load, nbytes))
        load = ImageLoad(peers, source, target)
        load.users = 1
        self._loads[ref.image] = load
        self._published.region(ref.image, ref.nbytes).load_started(target)
        self._run(load, f"load {ref.image[:12]}", partial(self._fetches.fill, load, ref))
        self._changed()
        return load

    def _on_progress(self, load: ImageLoad, arrived_bytes: int) -> None:
        fraction = arrived_bytes / max(1, load.target.manifest.nbytes)
        for watcher in load.watchers:
            watcher(fraction)

    def _run(self, load: ImageLoad, name: str, fetch: Callable[[], Awaitable[None]]) -> None:
        load.task = asyncio.create_task(self._fill(load, fetch), name=name)
        # Retrieve the exception even if no user is left to receive it.
        load.task.add_done_callback(lambda task: self._ended(load, task))

    async def _fill(self, load: ImageLoad, fetch: Callable[[], Awaitable[None]]) -> None:
        """Fill the target, then publish it to the host."""
        target, writer = load.target, load.target.writer
        image = target.manifest.sha256
        region = self._published.region(image, target.manifest.nbytes)
        try:
            await fetch()
            mapping = load.mapping = await run_in_thread(writer.publish, undo=close_if_open)
            self._origins.record(image, mapping.inode, load.origins)
            self._check(image, mapping.inode)
        except BaseException as error:
            target.fail(error)
            release_views(error)
            await run_in_thread(writer.abandon)
            raise
        finally:
            region.load_ended()
            del self._loads[image]
            self._changed()

    async def _from_arena(self, target: PartialImage) -> None:
        """Fill the target from this node's arena; peers are served from there meanwhile."""
        image = target.manifest.sha256
        buffer = self._sources.device_buffer(image)
        if buffer is None:
            raise StartFailed(f"image {image[:12]} has left the arena")
        await from_memory(buffer, target)

    def _ended(self, load: ImageLoad, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()
        if not load.users:
            load.free_memory()

    async def _leave(self, load: ImageLoad) -> None:
        """Cancel an unfinished load or free a finished one, after its last user left."""
        if load.task.done():
            load.free_memory()
        else:
            await cancel_and_wait(load.task)


def _discard(late: ImageWriter | LoadElsewhere | None) -> None:
    if isinstance(late, ImageWriter):
        late.abandon()
    elif isinstance(late, LoadElsewhere):
        late.close()
