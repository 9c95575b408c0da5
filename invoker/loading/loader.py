"""Loads images, which can be read as they arrive: into the host tier for all users, or into the arena."""

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
from invoker.loading.arena_load import arena_load
from invoker.loading.arena_writer import ArenaPlace
from invoker.loading.arrival import HostArrival, HostLoad, ImageLoad, MappedImage, release_views
from invoker.loading.cast_fetch import report_present
from invoker.loading.fetch import from_arena
from invoker.loading.fetch_order import FetchOrder, LoadSources
from invoker.loading.image_copies import ImageCopy
from invoker.loading.origins import Origins, node_origin
from invoker.loading.partial_image import PartialImage
from invoker.loading.progress import Progress
from invoker.loading.published import PublishedImages
from invoker.loading.sources import choose_peers
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.threads import run_in_daemon_thread, run_in_thread
from registry.errors import CorruptImage
from registry.images.codec import MAX_MANIFEST_BYTES, decode_manifest
from registry.images.manifest import Manifest
from registry.messages.images import ImageHolder, ImageRef
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
        check: Callable[[str, ImageCopy], None] = lambda image, copy: None,
    ) -> None:
        self._check = check
        self._sources = sources
        self._origins = Origins()
        self._fetches = FetchOrder(sources, self._origins, counters)
        self._tier = tier
        self._published = published
        self._changed = changed
        self._loads: dict[str, HostLoad] = {}
        self._into_arena: dict[str, asyncio.Event] = {}  # set at the end of the load of a whole image
        self._arena_targets: list[PartialImage] = []
        # Each lock is kept alive by the callers that hold or wait for it.
        self._entering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._manifests: dict[str, Manifest] = {}

    def __repr__(self) -> str:
        into_arena = f" into arena={len(self._into_arena)}" if self._into_arena else ""
        return f"<ImageLoader {list(self._loads.values())!r} entering={len(self._entering)}{into_arena}>"

    @property
    def reads_store(self) -> bool:
        return self._sources.store is not None

    @property
    def is_loading(self) -> bool:
        return bool(self._loads or self._into_arena)

    def arriving(self) -> list[PartialImage]:
        """Return the images that are being filled, in host memory or in the arena."""
        targets = [*(load.target for load in self._loads.values()), *self._arena_targets]
        return [target for target in targets if not target.is_complete]

    def distrust(self, image: str, copy: ImageCopy) -> None:
        """Take the image no more from where this copy of it came from, but from the store if possible."""
        store = self._sources.store
        self._origins.distrust(image, copy, None if store is None else store.label)

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
    ) -> AsyncIterator[HostArrival]:
        """Open an image in the host tier, loading it if necessary; it may still be loading when this yields.

        A load is shared by its users and cancelled when the last one leaves. A `yielding` one does not evict
        retained images. One into the arena is awaited, and then copied from there. Raises StartFailed with
        each source's failure, or HostTierFull.
        """
        load = await self._enter(ref, manifest, yielding=yielding)
        if isinstance(load, MappedImage):
            self._report_present(ref)
            try:
                progress(1.0)
                yield load
            finally:
                release(load.view)
                await run_in_thread(load.mapping.close)
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
    async def open_for_arena(
        self, ref: ImageRef, manifest: Manifest, place: ArenaPlace, progress: Progress, *, host_copy: bool
    ) -> AsyncIterator[HostArrival | ImageLoad]:
        """Open an image, or a part of one, that is to be in its place in the arena when the block ends.

        What the host tier has, or receives, is to be copied from there; so is everything with `host_copy`.
        Else it arrives in its place, where peers read a whole one: before the block ends, others must be able
        to find it there. Raises what `open_image` does, and OSError.
        """
        if not place.is_whole:  # casts bring all of an image
            ref = msgspec.structs.replace(ref, cast=None)
        if host_copy or (ended := await self._begin_in_arena(ref.image, place)) is None:
            async with self.open_image(ref, manifest, progress) as arrival:
                yield arrival
            return
        try:
            async with self._loaded_in_arena(ref, manifest, place, progress) as load:
                yield load
        finally:
            ended.set()
            if place.is_whole:
                del self._into_arena[ref.image]
                self._changed()

    async def _begin_in_arena(self, image: str, place: ArenaPlace) -> asyncio.Event | None:
        """Return the end of a new load into the arena; None if the host tier has or receives the image."""
        async with self._entering.setdefault(image, asyncio.Lock()):
            while (earlier := self._into_arena.get(image)) is not None:  # of a copy that was rejected
                await earlier.wait()
            if image in self._loads or await run_in_thread(self._tier.has_file, image):
                return None
            ended = asyncio.Event()
            if place.is_whole:
                self._into_arena[image] = ended
            return ended

    @asynccontextmanager
    async def _loaded_in_arena(
        self, ref: ImageRef, manifest: Manifest, place: ArenaPlace, progress: Progress
    ) -> AsyncIterator[ImageLoad]:
        """Load the image into its place, and serve it from there if it is whole."""
        peers, source = self._peers(ref, shares_tier=False)
        async with arena_load(ref, manifest, place, peers, source, self._fetches, progress) as load:
            if not place.is_whole:
                yield load
                return
            region = self._published.region(ref.image, ref.nbytes)
            region.load_started(load.target)
            self._arena_targets.append(load.target)
            self._changed()
            try:
                yield load
            finally:
                self._arena_targets.remove(load.target)
                region.load_ended()
                if load.is_complete:
                    self._report_present(ref, load.casts)
                    self._origins.record(ref.image, place.region, load.origins)
                    self._check(ref.image, place.region)

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
            if image in self._loads or image in self._into_arena:
                return
            begin = partial(self._tier.begin, image, manifest.nbytes, yielding=True)
            started = await run_in_thread(begin, undo=_discard)
            if not isinstance(started, ImageWriter):
                _discard(started)
                return
            target = PartialImage(started, manifest, lambda nbytes: None)
            load = HostLoad([], "arena", target, started)
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

    async def _enter(self, ref: ImageRef, manifest: Manifest, *, yielding: bool) -> MappedImage | HostLoad:
        """Return the mapped image, or its load with one more user."""
        lock = self._entering.setdefault(ref.image, asyncio.Lock())
        waited = False
        async with lock:
            while True:
                if (into_arena := self._into_arena.get(ref.image)) is not None:
                    await into_arena.wait()
                    continue
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

    def _peers(self, ref: ImageRef, *, shares_tier: bool) -> tuple[list[ImageHolder], str]:
        """Return the peers to load an image from, and the source that is shown at first."""
        sources = self._sources
        peers = choose_peers(ref.holders, node=sources.node, host=sources.host, shares_tier=shares_tier)
        return peers, node_origin(peers[0].node) if peers else "store" if self.reads_store else ""

    def _start_load(self, ref: ImageRef, manifest: Manifest, writer: ImageWriter) -> HostLoad:
        peers, source = self._peers(ref, shares_tier=True)
        # Late binding: the load is constructed from its target.
        target = PartialImage(writer, manifest, lambda nbytes: self._on_progress(load, nbytes))
        load = HostLoad(peers, source, target, writer)
        load.users = 1
        self._loads[ref.image] = load
        self._published.region(ref.image, ref.nbytes).load_started(target)
        self._run(load, f"load {ref.image[:12]}", partial(self._fetches.fill, load, ref))
        self._changed()
        return load

    def _on_progress(self, load: HostLoad, arrived_bytes: int) -> None:
        fraction = arrived_bytes / max(1, load.target.manifest.nbytes)
        for watcher in load.watchers:
            watcher(fraction)

    def _run(self, load: HostLoad, name: str, fetch: Callable[[], Awaitable[None]]) -> None:
        load.task = asyncio.create_task(self._fill(load, fetch), name=name)
        # Retrieve the exception even if no user is left to receive it.
        load.task.add_done_callback(lambda task: self._ended(load, task))

    async def _fill(self, load: HostLoad, fetch: Callable[[], Awaitable[None]]) -> None:
        """Fill the target, then publish it to the host."""
        target, writer = load.target, load.writer
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
        reader = self._sources.arena_reader(image)
        if reader is None:
            raise StartFailed(f"image {image[:12]} has left the arena")
        await from_arena(reader, target)

    def _ended(self, load: HostLoad, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()
        if not load.users:
            load.free_memory()

    async def _leave(self, load: HostLoad) -> None:
        """Cancel an unfinished load or free a finished one, after its last user left."""
        if load.task.done():
            await run_in_thread(load.free_memory)  # small pages take long to unmap
        else:
            await cancel_and_wait(load.task)


def _discard(late: ImageWriter | LoadElsewhere | None) -> None:
    if isinstance(late, ImageWriter):
        late.abandon()
    elif isinstance(late, LoadElsewhere):
        late.close()
