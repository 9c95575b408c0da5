"""Loads images into the host tier, once for all concurrent users, which can read it as it arrives."""

import asyncio
import hashlib
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from invoker.base.counters import Counters
from invoker.base.errors import StartFailed
from invoker.host_tier.image_writer import ImageWriter, LoadElsewhere
from invoker.host_tier.mapping import HostMapping, close_if_open, release
from invoker.host_tier.tier import HostTier
from invoker.loading.cast_fetch import CastContext, from_cast, from_peers, report_present
from invoker.loading.fetch import from_memory, from_orphaned_file, from_store
from invoker.loading.partial_image import PartialImage
from invoker.loading.published import PublishedImages
from invoker.loading.sources import choose_peers
from invoker.loading.store_access import StoreAccess
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.threads import run_in_daemon_thread, run_in_thread
from rdmacast.cast.record import CastMember, CastPlan
from rdmacast.cast.report import CastReport
from rdmacast.errors import CastError
from registry.errors import CorruptImage, RegistryError
from registry.images.codec import MAX_MANIFEST_BYTES, decode_manifest
from registry.images.manifest import Manifest
from registry.messages.node import ImageHolder, ImageRef
from registry.records.instance import StartKind

PROGRESS_INTERVAL_S = 0.1
_MANIFESTS_KEPT = 64
_ORIGINS_KEPT = 256

log = logging.getLogger("invoker.loader")

Progress = Callable[[float], None]
K = TypeVar("K")


class ImageArrival:
    """An image in host memory, complete or loading, valid while `ImageLoader.open_image` is open."""

    def __init__(self, kind: StartKind, source: str, view: memoryview) -> None:
        self.kind = kind
        self.source = source
        self.view = view.toreadonly()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} from {self.source}>"

    @property
    def is_complete(self) -> bool:
        """Return whether all of it is in the host tier."""
        return True

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Wait until the range may be read. Raises what the load failed with."""

    async def complete(self) -> None:
        """Wait until the whole image is in the host tier. Raises what the load failed with."""


class _MappedImage(ImageArrival):
    """An image that was complete when it was opened."""

    def __init__(self, kind: StartKind, mapping: HostMapping) -> None:
        super().__init__(kind, "host", mapping.view)
        self.mapping = mapping


class _ImageLoad(ImageArrival):
    """A load by this process: one task, shared by any number of users."""

    def __init__(self, peers: Sequence[ImageHolder], source: str, target: PartialImage) -> None:
        super().__init__(StartKind.COLD, source, target.writer.view)
        self.peers = peers
        self.target = target
        self.watchers: list[Progress] = []
        self.users = 0
        self.origins: set[str] = set()
        self.casts: set[str] = set()  # casts whose progress here has been published
        self.mapping: HostMapping | None = None
        self.task: asyncio.Task[None]

    @property
    def is_complete(self) -> bool:
        return self.mapping is not None

    async def wait_for(self, offset: int, nbytes: int) -> None:
        try:
            await self.target.wait_for(offset, nbytes)
        except CastError:
            await self.complete()  # raises the cause
            raise

    async def complete(self) -> None:
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise StartFailed(f"the load of image {self.target.manifest.sha256[:12]} was cancelled")
        self.task.result()

    def free_memory(self) -> None:
        """Free the memory after the load, without users; views being read stay valid."""
        release(self.view)
        self.target.release()
        close_if_open(self.mapping)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSources:
    """Where one node can load images from.

    `store` and `casts` are None if the node does not use them. `device_buffer` returns the bytes of an image
    on the device, if it is complete and the CPU can address them.
    """

    node: str
    host: str
    store: StoreAccess | None
    casts: CastContext | None
    device_buffer: Callable[[str], memoryview | None]


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
        self._origins: dict[tuple[str, int], set[str]] = {}  # of the file of an image: nodes, other sources
        self._distrusted: dict[str, set[str]] = {}
        self._sources = sources
        self._tier = tier
        self._published = published
        self._counters = counters
        self._changed = changed
        self._loads: dict[str, _ImageLoad] = {}
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

    def distrust(self, image: str, inode: int) -> None:
        """Take the image no more from where this file of it came from, but from the store if possible."""
        _keep_latest(self._distrusted)
        origins, store = self._origins.pop((image, inode), set()), self._sources.store
        if len(origins) > 1 and store is not None:
            origins.discard(store.label)  # it only filled what the others had left
        self._distrusted.setdefault(image, set()).update(origins)

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
        if isinstance(load, _MappedImage):
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

    async def _enter(
        self, ref: ImageRef, manifest: Manifest, *, yielding: bool
    ) -> "_MappedImage | _ImageLoad":
        """Return the mapped image, or its load with one more user."""
        lock = self._entering.setdefault(ref.image, asyncio.Lock())
        waited = False
        async with lock:
            while True:
                load = self._loads.get(ref.image)
                if load is not None and load.users:
                    load.users += 1
                    return load
                if load is not None:  # its last user left: it is being cancelled
                    await asyncio.wait([load.task])
                    continue
                mapping = await run_in_thread(self._tier.open, ref.image, undo=close_if_open)
                if mapping is not None:
                    # Peers may use this copy before the node's next record lists it.
                    self._published.region(ref.image, ref.nbytes)
                    self._check(ref.image, mapping.inode)
                    # After waiting for another process's load, the image was not here at the start.
                    return _MappedImage(StartKind.COLD if waited else StartKind.WARM, mapping)
                self._published.release_idle_mappings()
                begin = partial(self._tier.begin, ref.image, ref.nbytes, yielding=yielding)
                started = await run_in_thread(begin, undo=_discard)
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

    def _start_load(self, ref: ImageRef, manifest: Manifest, writer: ImageWriter) -> _ImageLoad:
        peers = choose_peers(ref.holders, node=self._sources.node, host=self._sources.host)
        source = _origin(peers[0].node) if peers else "store" if self.reads_store else ""
        # Late binding: the load is constructed from its target.
        target = PartialImage(writer, manifest, lambda nbytes: self._on_progress(load, nbytes))
        load = _ImageLoad(peers, source, target)
        load.users = 1
        self._loads[ref.image] = load
        self._published.region(ref.image, ref.nbytes).load_started(target)
        load.task = asyncio.create_task(self._fill(load, ref), name=f"load {ref.image[:12]}")
        # Retrieve the exception even if no user is left to receive it.
        load.task.add_done_callback(lambda task: self._ended(load, task))
        self._changed()
        return load

    def _on_progress(self, load: _ImageLoad, arrived_bytes: int) -> None:
        fraction = arrived_bytes / max(1, load.target.manifest.nbytes)
        for watcher in load.watchers:
            watcher(fraction)

    async def _fill(self, load: _ImageLoad, ref: ImageRef) -> None:
        """Fill the target from its sources, then publish it to the host."""
        target, writer = load.target, load.target.writer
        region = self._published.region(ref.image, ref.nbytes)
        try:
            await self._from_sources(load, ref)
            mapping = load.mapping = await run_in_thread(writer.publish, undo=close_if_open)
            _keep_latest(self._origins)
            self._origins[ref.image, mapping.inode] = load.origins
            self._check(ref.image, mapping.inode)
        except BaseException as error:
            target.fail(error)
            _release_views(error)
            await run_in_thread(writer.abandon)
            raise
        finally:
            region.load_ended()
            del self._loads[ref.image]
            self._changed()

    async def _from_sources(self, load: _ImageLoad, ref: ImageRef) -> None:
        """Try a dead process's file, the arena, the cast, all peers, then the store.

        Each source fills what is missing.
        """
        target = load.target
        image = target.manifest.sha256
        faults: list[str] = []
        for source, fetch in self._fetches(load, ref):
            if target.is_complete:
                break
            load.source = source
            load.origins.add(source)
            try:
                await fetch()
            except (CastError, RegistryError) as error:
                log.warning("image %s: source %s failed: %s", image[:12], source, error)
                faults.append(f"{source}: {error}")
                _release_views(error)
        if not target.is_complete:
            reasons = "; ".join(faults) or "no node has it and this node cannot read the store"
            raise StartFailed(f"image {image[:12]} cannot be loaded: {reasons}")

    def _fetches(
        self, load: _ImageLoad, ref: ImageRef
    ) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        target = load.target
        store, distrusted = self._sources.store, self._distrusted.get(target.manifest.sha256)
        if distrusted is not None and store is not None and store.label not in distrusted:
            yield store.label, partial(self._from_store, target, store)
            return
        if distrusted is not None:
            load.peers = [peer for peer in load.peers if _origin(peer.node) not in distrusted]
        if target.writer.is_resumed and distrusted is None:
            yield "host", partial(from_orphaned_file, target)
        buffer = self._sources.device_buffer(target.manifest.sha256)
        if buffer is not None:
            yield "arena", partial(from_memory, buffer, target)
        cast, context = ref.cast, self._sources.casts
        if (
            distrusted is None
            and cast is not None
            and context is not None
            and cast.has_target(self._sources.node)
        ):
            yield f"cast:{cast.cast_id}", partial(self._from_cast, load, cast, context)
        if load.peers and context is not None:
            yield _origin(load.peers[0].node), partial(self._from_peers, load, context)
        if store is not None and not (distrusted and store.label in distrusted):
            yield store.label, partial(self._from_store, target, store)

    async def _from_store(self, target: PartialImage, access: StoreAccess) -> None:
        await from_store(access.store, target, self._counters, local=access.label == "disk")

    async def _from_cast(self, load: _ImageLoad, cast: CastPlan, context: CastContext) -> None:
        load.casts.add(cast.cast_id)
        await self._received(load, cast.members, from_cast(cast, load.target, context))

    async def _from_peers(self, load: _ImageLoad, context: CastContext) -> None:
        members = [CastMember(node=one.node, host=one.host, address=one.cast) for one in load.peers]
        await self._received(load, members, from_peers(members, load.target, context))

    async def _received(
        self, load: _ImageLoad, offered: Sequence[CastMember], fetch: Awaitable[CastReport]
    ) -> None:
        """Record where the blocks came from: possibly all nodes if it fails, which leaves blocks behind."""
        names: Iterable[str] = [member.node for member in offered]
        try:
            report = await fetch
            names = report.bytes_by_peer
        finally:
            load.origins.update(map(_origin, names))
        if report.bytes_by_peer:
            most = max(report.bytes_by_peer, key=lambda node: report.bytes_by_peer[node])
            load.source = _origin(most)
        for node, choice in sorted(report.choices.items()):
            log.info(
                "image %s, cast %s: %d bytes from %s over %s (%s) in %.3f s",
                load.target.manifest.sha256[:12],
                report.cast,
                report.bytes_by_peer.get(node, 0),
                node,
                choice.transport,
                choice.reason,
                report.seconds,
            )

    def _ended(self, load: _ImageLoad, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()
        if not load.users:
            load.free_memory()

    async def _leave(self, load: _ImageLoad) -> None:
        """Cancel an unfinished load or free a finished one, after its last user left."""
        if load.task.done():
            load.free_memory()
        else:
            await cancel_and_wait(load.task)


def _origin(node: str) -> str:
    """Return the name of a node as a source, whatever the node is called: `disk` is not the store."""
    return f"node:{node}"


def _keep_latest(known: dict[K, set[str]]) -> None:
    while len(known) >= _ORIGINS_KEPT:
        del known[next(iter(known))]


def _release_views(error: BaseException) -> None:
    """Release views held by the traceback's frames: the error outlives the memory."""
    traceback.clear_frames(error.__traceback__)


def _discard(late: ImageWriter | LoadElsewhere | None) -> None:
    if isinstance(late, ImageWriter):
        late.abandon()
    elif isinstance(late, LoadElsewhere):
        late.close()


class ProgressThrottle:
    """A progress callback that forwards at most one report per PROGRESS_INTERVAL_S, and always the last."""

    def __init__(self, report: Progress, now_s: Callable[[], float]) -> None:
        self._report = report
        self._now_s = now_s
        self._next_s = 0.0

    def __call__(self, fraction: float) -> None:
        now_s = self._now_s()
        if fraction >= 1.0 or now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_INTERVAL_S
            self._report(fraction)
