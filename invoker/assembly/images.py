"""The images of a node: their caches, loads, checks and copies."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from invoker.assembly.accounting import Accounting
from invoker.assembly.casting import Casting
from invoker.assembly.memory import Memory
from invoker.assembly.setup import NodeSetup
from invoker.base.errors import SettingsError
from invoker.host_tier.tier import HostTier
from invoker.instances.device_cache import DeviceCache
from invoker.instances.manager import Instances
from invoker.loading.cast_fetch import CastContext
from invoker.loading.disk_cache import DiskCache
from invoker.loading.disk_writer import DiskWriter
from invoker.loading.fetch_order import LoadSources
from invoker.loading.image_checks import ImageChecks
from invoker.loading.image_copies import ImageCopies, ImageCopy
from invoker.loading.loader import ImageLoader
from invoker.loading.published import PublishedImages
from invoker.loading.store_access import reach_store
from rdmacast.aio.groups import cancel_and_discard
from rdmacast.aio.threads import run_in_thread
from rdmacast.link_rate import LinkRate
from registry.records.cast import CastProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The parts of a node that hold, load and check images; without those of the disk tier if it has none."""

    device_cache: DeviceCache
    published: PublishedImages
    loader: ImageLoader
    checks: ImageChecks
    disk: DiskCache | None
    disk_writer: DiskWriter | None


async def open_images(
    setup: NodeSetup, memory: Memory, casting: Casting, accounting: Accounting, stack: AsyncExitStack
) -> Images:
    changed = accounting.publisher.node_changed
    # The loader is bound late: it needs the cache.
    device_cache = DeviceCache(
        *(memory.arena, setup.settings.keep_hot_s, setup.clock, changed, memory.tier.touch),
        lambda image: loader.demotion(image),
    )
    stack.push_async_callback(device_cache.aclose)
    disk, copies = await _open_disk(setup, casting), ImageCopies(memory.tier, device_cache)
    writer = None if disk is None else DiskWriter(disk, copies, changed)

    def on_verified(image: str, copy: ImageCopy) -> None:
        if writer is not None:
            writer.add(image, copy)
        changed()

    checks = ImageChecks(
        memory.tier,
        copies,
        accounting.counters,
        settle_s=setup.settings.checks_settle_s,
        on_verified=on_verified,
    )
    published = PublishedImages(casting.regions, memory.tier, device_cache, checks.add)
    stack.callback(published.close)
    sources = replace(await _load_sources(setup, casting, accounting, device_cache), disk=disk)
    loader = ImageLoader(
        setup.limit_sources(sources), memory.tier, published, accounting.counters, changed, checks.add
    )
    return Images(
        device_cache=device_cache,
        published=published,
        loader=loader,
        checks=checks,
        disk=disk,
        disk_writer=writer,
    )


def start_checks(
    images: Images,
    tier: HostTier,
    instances: Instances,
    *,
    changed: Callable[[], None],
    stack: AsyncExitStack,
) -> None:
    async def reject(image: str, copy: ImageCopy) -> None:
        # Without a turn of the loop between these: nothing of it is passed on or published again.
        if isinstance(copy, int):
            tier.discard(image, copy)
        images.device_cache.reject(image)
        images.loader.distrust(image, copy)
        instances.reject(image)
        changed()
        await images.published.withdraw(image)

    def is_busy() -> bool:
        return images.loader.is_loading or instances.is_starting

    checking = asyncio.create_task(images.checks.run(is_busy, reject), name="image checks")
    stack.push_async_callback(cancel_and_discard, checking)
    if images.disk_writer is not None:
        writing = asyncio.create_task(images.disk_writer.run(is_busy), name="disk tier")
        stack.push_async_callback(cancel_and_discard, writing)


async def _open_disk(setup: NodeSetup, casting: Casting) -> DiskCache | None:
    """Open the disk tier if there is one. Raises SettingsError."""
    settings = setup.settings
    if not settings.disk_cache_bytes:
        return None
    folder = settings.disk_cache_dir / setup.config.cluster_id / settings.host_id
    port, capped = casting.links.connector.port_rate, settings.link_rate_bytes_s
    link_bytes_s = capped or (LinkRate() if port is None else port).bytes_per_s
    try:
        return await run_in_thread(DiskCache, folder, settings.disk_cache_bytes, link_bytes_s, setup.space_of)
    except OSError as error:
        raise SettingsError(
            f"--disk-cache-dir {settings.disk_cache_dir}: {error.strerror or error}"
        ) from error


async def _load_sources(
    setup: NodeSetup, casting: Casting, accounting: Accounting, device_cache: DeviceCache
) -> LoadSources:
    settings, config = setup.settings, setup.config
    publish: Callable[[CastProgress], None] = accounting.publisher.cast_changed
    if setup.tracing is not None:
        publish = setup.tracing.starts.watched_casts(publish)
    casts = CastContext(
        node=settings.node_id,
        links=casting.links,
        counters=accounting.counters,
        clock=setup.clock,
        publish=publish,
    )
    return LoadSources(
        node=settings.node_id,
        host=settings.host_id,
        store=await reach_store(settings.store_url or config.store_url, config.cluster_id),
        casts=casts,
        arena_reader=device_cache.reader,
    )
