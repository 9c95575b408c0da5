"""The order in which a load tries its sources; each fills what the earlier ones have left."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from invoker.base.counters import Counters
from invoker.base.errors import StartFailed
from invoker.loading.arrival import HostLoad, ImageLoad, release_views
from invoker.loading.cast_fetch import CastContext, from_cast, from_peers
from invoker.loading.disk_cache import DiskCache
from invoker.loading.fetch import from_arena, from_blobs, from_orphaned_file
from invoker.loading.image_copies import ReadArena
from invoker.loading.origins import Origins, node_origin
from invoker.loading.partial_image import PartialImage
from invoker.loading.store_access import StoreAccess
from rdmacast.aio.threads import run_in_thread
from rdmacast.cast.record import CastMember, CastPlan
from rdmacast.cast.report import CastReport
from rdmacast.errors import CastError
from registry.errors import CorruptImage, RegistryError, StoreError
from registry.messages.images import ImageRef

DISK_CACHE = "disk-cache"  # as a source

log = logging.getLogger("invoker.loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSources:
    """Where one node can load images from.

    `store`, `casts` and `disk` are None if the node does not use them. `arena_reader` reads an image that is
    complete in the arena; it returns None for others.
    """

    node: str
    host: str
    store: StoreAccess | None
    casts: CastContext | None
    arena_reader: Callable[[str], ReadArena | None]
    disk: DiskCache | None = None


class FetchOrder:
    """Fills the images of one node from its sources, except from those that once gave a forged one."""

    def __init__(self, sources: LoadSources, origins: Origins, counters: Counters) -> None:
        self._sources = sources
        self._origins = origins
        self._counters = counters

    async def fill(self, load: ImageLoad, ref: ImageRef) -> None:
        """Try a dead process's file, the arena, the cast, all peers, the disk, then the store.

        A disk that is faster than a link comes before the cast.
        Each source fills what is missing. Raises StartFailed with the failure of each.
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
                release_views(error)
        if not target.is_complete:
            reasons = "; ".join(faults) or "no node has it and this node cannot read the store"
            raise StartFailed(f"image {image[:12]} cannot be loaded: {reasons}")

    def _fetches(self, load: ImageLoad, ref: ImageRef) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        target = load.target
        store, distrusted = self._sources.store, self._origins.distrusted(target.manifest.sha256)
        if distrusted is not None and store is not None and store.label not in distrusted:
            yield store.label, partial(self._from_store, target, store)
            return
        if distrusted is not None:
            load.peers = [peer for peer in load.peers if node_origin(peer.node) not in distrusted]
        if isinstance(load, HostLoad) and load.writer.is_resumed and distrusted is None:
            yield "host", partial(from_orphaned_file, load.writer, target)
        reader = self._sources.arena_reader(target.manifest.sha256)
        if reader is not None:
            yield "arena", partial(from_arena, reader, target)
        disk = self._sources.disk
        if disk is not None and (not disk.holds(target.manifest.sha256) or DISK_CACHE in (distrusted or ())):
            disk = None
        if disk is not None and disk.goes_first:
            yield DISK_CACHE, partial(self._from_disk, target, disk)
        cast, context = ref.cast, self._sources.casts
        if (
            distrusted is None
            and cast is not None
            and context is not None
            and cast.has_target(self._sources.node)
        ):
            yield f"cast:{cast.cast_id}", partial(self._from_cast, load, cast, context)
        if load.peers and context is not None:
            yield node_origin(load.peers[0].node), partial(self._from_peers, load, context)
        if disk is not None and not disk.goes_first:
            yield DISK_CACHE, partial(self._from_disk, target, disk)
        if store is not None and not (distrusted and store.label in distrusted):
            yield store.label, partial(self._from_store, target, store)

    async def _from_store(self, target: PartialImage, access: StoreAccess) -> None:
        def count(nbytes: int) -> None:
            if access.label == "disk":
                self._counters.disk_read_bytes += nbytes
            else:
                self._counters.store_read_bytes += nbytes

        await from_blobs(access.store, target, count)

    async def _from_disk(self, target: PartialImage, disk: DiskCache) -> None:
        """Read what is missing from the disk tier; an image that is damaged there is removed."""
        read_bytes, started_s = 0, time.monotonic()

        def count(nbytes: int) -> None:
            nonlocal read_bytes
            read_bytes += nbytes
            self._counters.disk_cache_read_bytes += nbytes

        try:
            await from_blobs(disk, target, count)
        except CorruptImage:
            with suppress(StoreError):
                await run_in_thread(disk.drop, target.manifest.sha256)
            raise
        disk.measured(read_bytes, time.monotonic() - started_s)

    async def _from_cast(self, load: ImageLoad, cast: CastPlan, context: CastContext) -> None:
        load.casts.add(cast.cast_id)
        await self._received(load, cast.members, from_cast(cast, load.target, context))

    async def _from_peers(self, load: ImageLoad, context: CastContext) -> None:
        members = [CastMember(node=one.node, host=one.host, address=one.cast) for one in load.peers]
        await self._received(load, members, from_peers(members, load.target, context))

    async def _received(
        self, load: ImageLoad, offered: Sequence[CastMember], fetch: Awaitable[CastReport]
    ) -> None:
        """Record where the blocks came from: possibly all nodes if it fails, which leaves blocks behind."""
        names: Iterable[str] = [member.node for member in offered]
        try:
            report = await fetch
            names = report.bytes_by_peer
        finally:
            load.origins.update(map(node_origin, names))
        if report.bytes_by_peer:
            most = max(report.bytes_by_peer, key=lambda node: report.bytes_by_peer[node])
            load.source = node_origin(most)
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
