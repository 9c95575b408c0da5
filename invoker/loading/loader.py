"""Brings images into the host tier, once for all who ask at the same time, and lets them watch it arrive."""

import asyncio
import hashlib
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakValueDictionary

from invoker.cast_fetch import CastGear, from_cast, takes_part, tell_present
from invoker.counters import Counters
from invoker.errors import StartFailed
from invoker.fetch import Target, from_memory, from_peers, from_remains, from_store
from invoker.filling import Filling, LoadElsewhere
from invoker.host_mapping import HostMapping, close_if_open, release
from invoker.host_tier import HostTier
from invoker.published import PublishedImages
from invoker.start_plan import Residence, StartPlan, choose_start
from invoker.store_access import StoreAccess
from invoker.threads import in_own_thread, in_thread
from rdmacast.connector import Connector
from rdmacast.errors import CastError
from rdmacast.transport import PeerAddress
from registry.errors import CorruptImage, RegistryError
from registry.images.codec import MAX_MANIFEST_BYTES, decode_manifest
from registry.images.manifest import Manifest
from registry.instance import StartKind
from registry.messages import CastRef, Holder, ImageRef

PROGRESS_INTERVAL_S = 0.1
_MANIFESTS_KEPT = 64

log = logging.getLogger("invoker.loader")

Progress = Callable[[float], None]


class Arrival:
    """An image in host memory, or on its way there, for as long as `ImageLoader.arriving` is open."""

    def __init__(self, kind: StartKind, source: str, view: memoryview) -> None:
        self.kind = kind
        self.source = source
        self.view = view.toreadonly()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} from {self.source}>"

    @property
    def is_whole(self) -> bool:
        """Whether all of it is in the host tier."""
        return True

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Return once the range may be read. Raises what the load failed with."""

    async def complete(self) -> None:
        """Return once the whole image is in the host tier. Raises what the load failed with."""


class _Opened(Arrival):
    """An image that was complete already."""

    def __init__(self, kind: StartKind, mapping: HostMapping) -> None:
        super().__init__(kind, "host", mapping.view)
        self.mapping = mapping


class _Load(Arrival):
    """A load by this process: one task, watched by any number of users."""

    def __init__(self, plan: StartPlan, target: Target) -> None:
        super().__init__(plan.kind, plan.first, target.filling.view)
        self.plan = plan
        self.target = target
        self.watchers: list[Progress] = []
        self.users = 0
        self.casts: set[str] = set()  # of which it told how far they came here
        self.mapping: HostMapping | None = None
        self.task: asyncio.Task[None]

    @property
    def is_whole(self) -> bool:
        return self.mapping is not None

    async def wait_for(self, offset: int, nbytes: int) -> None:
        try:
            await self.target.region.wait_for(offset, nbytes)
        except CastError:
            await self.complete()  # has the reason
            raise

    async def complete(self) -> None:
        await asyncio.wait([self.task])
        if self.task.cancelled():
            raise StartFailed(f"the load of image {self.target.manifest.sha256[:12]} was given up")
        self.task.result()

    def let_go(self) -> None:
        """Give the memory back as far as nobody reads it. The load has ended, and nobody uses it."""
        release(self.view)
        self.target.release()
        close_if_open(self.mapping)


class ImageLoader:
    """One node's way to images. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        node: str,
        host: str,
        tier: HostTier,
        published: PublishedImages,
        store: StoreAccess | None,
        connector: Connector,
        casting: CastGear | None,
        in_arena: Callable[[str], memoryview | None],
        counters: Counters,
        changed: Callable[[], None],
    ) -> None:
        self._node = node
        self._host = host
        self._tier = tier
        self._published = published
        self._store = store
        self._connector = connector
        self._casting = casting
        self._in_arena = in_arena
        self._counters = counters
        self._changed = changed
        self._loads: dict[str, _Load] = {}
        # Each is kept by those who enter, or wait to.
        self._entering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._manifests: dict[str, Manifest] = {}

    def __repr__(self) -> str:
        return f"<ImageLoader {list(self._loads.values())!r} entering={len(self._entering)}>"

    @property
    def reads_store(self) -> bool:
        return self._store is not None

    async def manifest(self, ref: ImageRef) -> Manifest:
        """The image's manifest, from the request or the store, checked. Raises CorruptImage, StoreError."""
        known = self._manifests.get(ref.manifest)
        if known is not None and known.sha256 == ref.image:
            return known
        encoded = ref.manifest_bytes
        if not encoded:
            if self._store is None:
                raise StartFailed(f"no manifest came with image {ref.image} and this node reads no store")
            encoded = await self._store.store.read(ref.manifest, limit=MAX_MANIFEST_BYTES)
        if hashlib.sha256(encoded).hexdigest() != ref.manifest:
            raise CorruptImage(f"the manifest of image {ref.image} does not match its digest {ref.manifest}")
        manifest = await in_thread(decode_manifest, encoded)
        if manifest.sha256 != ref.image or manifest.nbytes != ref.nbytes:
            raise CorruptImage(f"manifest {ref.manifest} is not that of image {ref.image}")
        while len(self._manifests) >= _MANIFESTS_KEPT:
            del self._manifests[next(iter(self._manifests))]
        self._manifests[ref.manifest] = manifest
        return manifest

    @asynccontextmanager
    async def arriving(
        self, ref: ImageRef, manifest: Manifest, progress: Progress, *, yielding: bool = False
    ) -> AsyncIterator[Arrival]:
        """Open an image in the host tier, loading it if need be; it may still be arriving.

        A load belongs to all who wait for it, and ends when the last of them leaves. One that is
        `yielding` takes no room of kept images. Raises StartFailed naming each source and its fault,
        or HostTierFull.
        """
        load = await self._enter(ref, manifest, yielding=yielding)
        if isinstance(load, _Opened):
            self._tell_present(ref)
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
            if load.is_whole:
                self._tell_present(ref, load.casts)
            load.users -= 1
            if not load.users:
                await self._leave(load)

    def _tell_present(self, ref: ImageRef, told: Collection[str] = ()) -> None:
        """Tell of the cast that was to bring the image, which came another way, if nobody did."""
        cast, casting = ref.cast, self._casting
        if cast is None or casting is None or cast.cast_id in told or not takes_part(cast, self._node):
            return
        tell_present(cast, ref.nbytes, casting)

    async def _enter(self, ref: ImageRef, manifest: Manifest, *, yielding: bool) -> "_Opened | _Load":
        """The mapped image, or the load that brings it, with one more user."""
        lock = self._entering.setdefault(ref.image, asyncio.Lock())
        waited = False
        async with lock:
            while True:
                load = self._loads.get(ref.image)
                if load is not None and load.users:
                    load.users += 1
                    return load
                if load is not None:  # its last user left: it is being stopped
                    await asyncio.wait([load.task])
                    continue
                opened = await in_thread(self._tier.open, ref.image, undo=close_if_open)
                if opened is not None:
                    # Peers may be told of this copy before the node's next record is.
                    self._published.region(ref.image, ref.nbytes)
                    # What another process of this host was loading when we came was not here then.
                    return _Opened(StartKind.COLD if waited else StartKind.WARM, opened)
                self._published.make_way()
                begin = partial(self._tier.begin, ref.image, ref.nbytes, yielding=yielding)
                begun = await in_thread(begin, undo=_abandon)
                if isinstance(begun, Filling):
                    return self._begin(ref, manifest, begun)
                if isinstance(begun, LoadElsewhere):
                    waited = True
                    await self._wait(ref, begun)

    async def _wait(self, ref: ImageRef, elsewhere: LoadElsewhere) -> None:
        """Wait for another process of this host; peers that ask this node meanwhile wait with it."""
        region = self._published.region(ref.image, ref.nbytes)
        region.awaits()
        try:
            await in_own_thread(self._tier.wait, elsewhere)
        finally:
            region.awaited_enough()

    def _begin(self, ref: ImageRef, manifest: Manifest, filling: Filling) -> _Load:
        plan = choose_start(
            Residence.NOWHERE, ref.holders, node=self._node, host=self._host, reads_store=self.reads_store
        )
        # Bound late: the load does not exist before its target.
        target = Target(filling, manifest, lambda arrived: self._arrived(load, arrived))
        load = _Load(plan, target)
        load.users = 1
        self._loads[ref.image] = load
        self._published.region(ref.image, ref.nbytes).arrives(target.region)
        load.task = asyncio.create_task(self._fill(load, ref), name=f"load {ref.image[:12]}")
        # Whoever waits learns of a failure; it must not count as unseen if all have left by then.
        load.task.add_done_callback(lambda task: self._ended(load, task))
        self._changed()
        return load

    def _arrived(self, load: _Load, arrived_bytes: int) -> None:
        fraction = arrived_bytes / max(1, load.target.manifest.nbytes)
        for watcher in load.watchers:
            watcher(fraction)

    async def _fill(self, load: _Load, ref: ImageRef) -> None:
        """Fill the target from one source after the other, then publish it to the host."""
        target, filling = load.target, load.target.filling
        region = self._published.region(ref.image, ref.nbytes)
        try:
            await self._from_sources(load, ref)
            load.mapping = await in_thread(filling.publish, undo=close_if_open)
        except BaseException as error:
            target.region.fail(error)
            _drop_views(error)
            await in_thread(filling.abandon)
            raise
        finally:
            region.arrived()
            del self._loads[ref.image]
            self._changed()

    async def _from_sources(self, load: _Load, ref: ImageRef) -> None:
        """Try what a dead process left, the arena, the cast, all peers, then the store.

        Each fills what is still missing.
        """
        target = load.target
        image = target.manifest.sha256
        faults: list[str] = []
        for source, fetch in self._ways(load, ref):
            if target.is_complete:
                break
            load.source = source
            try:
                await fetch()
            except (CastError, RegistryError) as error:
                log.warning("image %s from %s: %s", image[:12], source, error)
                faults.append(f"{source}: {error}")
                _drop_views(error)
        if not target.is_complete:
            reasons = "; ".join(faults) or "no node holds it and this node cannot read the store"
            raise StartFailed(f"image {image[:12]} cannot be loaded: {reasons}")

    def _ways(self, load: _Load, ref: ImageRef) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        target = load.target
        if target.filling.is_resumed:
            yield "host", partial(from_remains, target)
        buffer = self._in_arena(target.manifest.sha256)
        if buffer is not None:
            yield "arena", partial(from_memory, buffer, target)
        cast, casting = ref.cast, self._casting
        if cast is not None and casting is not None and takes_part(cast, self._node):
            yield f"cast:{cast.cast_id}", partial(self._from_cast, load, cast, casting)
        by_source = {f"node:{holder.node}": holder for holder in ref.holders}
        peers = [source for source in load.plan.sources if source in by_source]
        if peers:
            yield peers[0], partial(self._from_peers, load, [by_source[source] for source in peers])
        if self._store is not None:
            local = self._store.label == "disk"
            store = self._store.store
            yield self._store.label, partial(from_store, store, target, self._counters, local=local)

    async def _from_cast(self, load: _Load, cast: CastRef, casting: CastGear) -> None:
        load.casts.add(cast.cast_id)
        report = await from_cast(cast, load.target, casting)
        if report.bytes_by_peer:
            most = max(report.bytes_by_peer, key=lambda node: report.bytes_by_peer[node])
            load.source = f"node:{most}"
        log.info(
            "image %s: %d bytes by cast %s in %.3f s: %s",
            load.target.manifest.sha256[:12],
            report.nbytes,
            cast.cast_id,
            report.seconds,
            ", ".join(f"{nbytes} from {node}" for node, nbytes in sorted(report.bytes_by_peer.items())),
        )

    async def _from_peers(self, load: _Load, holders: Sequence[Holder]) -> None:
        addresses = {holder.cast: holder for holder in holders}
        peers = [PeerAddress(url=holder.cast, host=holder.host) for holder in addresses.values()]
        report = await from_peers(self._connector, peers, load.target, self._counters)
        if report.bytes_by_source:
            most = max(report.bytes_by_source, key=lambda url: report.bytes_by_source[url])
            load.source = f"node:{addresses[most].node}"
        for url, choice in report.choices.items():
            log.info(
                "image %s: %d bytes from %s over %s (%s) in %.3f s",
                load.target.manifest.sha256[:12],
                report.bytes_by_source.get(url, 0),
                addresses[url].node,
                choice.transport,
                choice.reason,
                report.seconds,
            )

    def _ended(self, load: _Load, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()
        if not load.users:
            load.let_go()

    async def _leave(self, load: _Load) -> None:
        """The last user left: stop an unfinished load, let go of a finished one."""
        if load.task.done():
            load.let_go()
        else:
            load.task.cancel()
            await asyncio.wait([load.task])


def _drop_views(error: BaseException) -> None:
    """Let go of what the frames that raised it looked at: an error outlives the memory it tells of."""
    traceback.clear_frames(error.__traceback__)


def _abandon(late: Filling | LoadElsewhere | None) -> None:
    if isinstance(late, Filling):
        late.abandon()
    elif isinstance(late, LoadElsewhere):
        late.close()


class ProgressThrottle:
    """Passes on at most one report of progress every PROGRESS_INTERVAL_S, and always the last."""

    def __init__(self, report: Progress, now_s: Callable[[], float]) -> None:
        self._report = report
        self._now_s = now_s
        self._next_s = 0.0

    def __call__(self, fraction: float) -> None:
        now_s = self._now_s()
        if fraction >= 1.0 or now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_INTERVAL_S
            self._report(fraction)
