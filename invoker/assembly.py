"""The parts of a node, put together."""

import asyncio
import logging
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from invoker.base.counters import Counters
from invoker.base.errors import SettingsError
from invoker.device import (
    DeviceFacts,
    default_arena_bytes,
    default_host_bytes,
    default_spare_bytes,
    default_vllm_bytes,
    detect_device,
    usable_cores,
)
from invoker.emulated.arena import EmulatedArena
from invoker.engine.compute_threads import set_compute_threads
from invoker.engine.factory import EngineFactory
from invoker.handlers.process import HandlerProcess
from invoker.host_tier.folder import MODELS
from invoker.host_tier.model_folders import ModelFolders
from invoker.host_tier.tier import HostTier
from invoker.instances.calls import Calls
from invoker.instances.device_cache import DeviceCache
from invoker.instances.load_feed import LoadFeed
from invoker.instances.manager import Instances
from invoker.instances.start_context import InstanceContext, MakeHandler
from invoker.kv.transfer import KvConnector
from invoker.links.listener import StageListener
from invoker.live.hosted import HostedStages
from invoker.live.pipelines import HostedPipelines
from invoker.loading.attach import AttachServer, socket_path
from invoker.loading.cast_fetch import CastContext
from invoker.loading.disk_cache import DiskCache
from invoker.loading.disk_writer import DiskWriter
from invoker.loading.engine_images import EngineImages
from invoker.loading.fetch_order import LoadSources
from invoker.loading.image_checks import ImageChecks
from invoker.loading.loader import ImageLoader
from invoker.loading.published import PublishedImages
from invoker.loading.store_access import reach_store
from invoker.loading.transports import CastTransports, make_connector, open_transports
from invoker.log_rings import LogRings
from invoker.memory.arena import Arena, CpuArena
from invoker.memory.cuda_arena import CudaArena
from invoker.metering.journal import MeterJournal, discard_recovered, recover_journals
from invoker.metering.meter import GpuMeter
from invoker.node import Node, NodeDependencies, remote_error
from invoker.pipeline.engines import StageContext
from invoker.publisher import Publisher
from invoker.scratch import scratch_folder
from invoker.settings import Settings
from invoker.vllm.forking import make_zygote
from invoker.vllm.host import VllmHost, has_module
from rdmacast.address import TcpAddress, parse_url
from rdmacast.aio.threads import run_in_thread
from rdmacast.cast.hooks import CastLinks
from rdmacast.cast.watch_link import RegionWatcher
from rdmacast.link_rate import LinkRate
from rdmacast.protocol.tls import NodeTls
from rdmacast.server.region_server import RegionServer
from registry.channel.client import Channel, ChannelServer
from registry.clock import Clock
from registry.config.emulation import is_emulated, parse_device
from registry.records.engine import EngineKind
from registry.state import ClusterConfig, State

log = logging.getLogger("invoker.assembly")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """What a node is built from."""

    settings: Settings
    state: State
    engines: EngineFactory
    config: ClusterConfig
    epoch: int
    clock: Clock
    channel_tls: NodeTls
    limit_sources: Callable[[LoadSources], LoadSources]

    @property
    def root(self) -> Path:
        """Return the cluster's folder in shared memory."""
        return self.settings.shm_dir / f"hypercast-{self.config.cluster_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    facts: DeviceFacts
    arena: Arena
    tier: HostTier
    folders: ModelFolders


@dataclass(frozen=True, slots=True, kw_only=True)
class _Casting:
    regions: RegionServer
    listener: StageListener
    links: CastLinks
    transports: CastTransports


@dataclass(frozen=True, slots=True, kw_only=True)
class _Images:
    arena: Arena
    device_cache: DeviceCache
    published: PublishedImages
    loader: ImageLoader
    checks: ImageChecks
    disk: DiskCache | None
    disk_writer: DiskWriter | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accounting:
    counters: Counters
    meter: GpuMeter
    calls: Calls
    publisher: Publisher


async def assemble(setup: NodeSetup, stack: AsyncExitStack) -> tuple[Node, Publisher, ChannelServer]:
    """Build a node, its publisher and its channel server, all closed by `stack`.

    Raises SettingsError, HostTierError or OSError.
    """
    settings = setup.settings
    memory = await _open_memory(setup, stack)
    casting = _open_casting(setup, memory.arena, stack)
    accounting = await _open_accounting(setup, stack)
    images = await _open_images(setup, memory, casting, accounting, stack)
    rings = LogRings(setup.clock)
    vllm = await _open_vllm(setup, memory, stack)
    resources = _instance_context(setup, images, accounting.meter, rings, vllm, stack)
    changed = accounting.publisher.instance_changed
    instances = Instances(settings.node_id, resources, accounting.counters, published=changed)
    listener = casting.listener
    context = StageContext(resources=resources, calls=accounting.calls, instance=instances.get)
    pipelines = HostedPipelines(
        settings.node_id,
        partial(Channel.connect, secret=settings.secret, tls=setup.channel_tls.client),
        listener,
        context,
        lambda peer: peer in channel.peers,
    )
    dependencies = NodeDependencies(
        settings=settings,
        facts=memory.facts,
        clock=setup.clock,
        arena=memory.arena,
        tier=memory.tier,
        folders=memory.folders,
        device_cache=images.device_cache,
        published=images.published,
        loader=images.loader,
        instances=instances,
        loads=resources.loads,
        stages=HostedStages(listener, context),
        pipelines=pipelines,
        kv_connector=KvConnector(listener, settings.kv_moves),
        meter=accounting.meter,
        calls=accounting.calls,
        rings=rings,
        counters=accounting.counters,
        cast_sent_bytes=lambda: casting.regions.counters["cast_sent_bytes"],
        quarantined_bytes=casting.transports.quarantined_bytes,
        changed=accounting.publisher.node_changed,
        links=casting.links,
        disk=images.disk,
        disk_writer=images.disk_writer,
        port_rate=casting.links.connector.port_rate,
        engines=(EngineKind.NATIVE, *((EngineKind.VLLM,) if vllm is not None else ())),
    )
    node = Node(dependencies, setup.epoch)
    _start_checks(images, memory.tier, instances, changed=accounting.publisher.node_changed, stack=stack)
    stack.push_async_callback(instances.drain, 0.0)
    stack.push_async_callback(pipelines.aclose)
    channel = await _open_servers(setup, node, accounting.calls, casting, resources.engine_images, stack)
    return node, accounting.publisher, channel


def _start_checks(
    images: _Images,
    tier: HostTier,
    instances: Instances,
    *,
    changed: Callable[[], None],
    stack: AsyncExitStack,
) -> None:
    async def reject(image: str, inode: int) -> None:
        # Without a turn of the loop between these: nothing of it is passed on or published again.
        tier.discard(image, inode)
        images.device_cache.reject(image)
        images.loader.distrust(image, inode)
        instances.reject(image)
        changed()
        await images.published.withdraw(image)

    def is_busy() -> bool:
        return images.loader.is_loading or instances.is_starting

    stack.callback(asyncio.create_task(images.checks.run(is_busy, reject), name="image checks").cancel)
    if images.disk_writer is not None:
        stack.callback(asyncio.create_task(images.disk_writer.run(is_busy), name="disk tier").cancel)


async def _open_images(
    setup: NodeSetup, memory: _Memory, casting: _Casting, accounting: _Accounting, stack: AsyncExitStack
) -> _Images:
    changed = accounting.publisher.node_changed
    # The loader, which is made after the cache.
    device_cache = DeviceCache(
        *(memory.arena, setup.settings.keep_hot_s, setup.clock, changed, memory.tier.touch),
        lambda image: loader.demotion(image),
    )
    stack.push_async_callback(device_cache.aclose)
    disk = _open_disk(setup, casting, stack)
    writer = None if disk is None else DiskWriter(disk, memory.tier, changed)

    def on_verified(image: str, inode: int) -> None:
        if writer is not None:
            writer.add(image, inode)
        changed()

    checks = ImageChecks(
        memory.tier,
        accounting.counters,
        settle_s=setup.settings.checks_settle_s,
        on_verified=on_verified,
    )
    published = PublishedImages(
        casting.regions, memory.tier, device_cache.buffer, device_cache.gpu_pointer, checks.add
    )
    stack.callback(published.close)
    sources = replace(await _load_sources(setup, casting, accounting, device_cache), disk=disk)
    loader = ImageLoader(
        setup.limit_sources(sources), memory.tier, published, accounting.counters, changed, checks.add
    )
    return _Images(
        arena=memory.arena,
        device_cache=device_cache,
        published=published,
        loader=loader,
        checks=checks,
        disk=disk,
        disk_writer=writer,
    )


def _open_disk(setup: NodeSetup, casting: _Casting, stack: AsyncExitStack) -> DiskCache | None:
    """Open the disk tier if there is one. Raises SettingsError."""
    settings = setup.settings
    if not settings.disk_cache_bytes:
        return None
    folder = settings.disk_cache_dir / setup.config.cluster_id / settings.host_id
    port, capped = casting.links.connector.port_rate, settings.link_rate_bytes_s
    link_bytes_s = capped or (LinkRate() if port is None else port).bytes_per_s
    try:
        disk = DiskCache(folder, settings.disk_cache_bytes, link_bytes_s)
    except OSError as error:
        raise SettingsError(
            f"--disk-cache-dir {settings.disk_cache_dir}: {error.strerror or error}"
        ) from error
    stack.callback(disk.close)
    return disk


def _instance_context(
    setup: NodeSetup,
    images: _Images,
    meter: GpuMeter,
    rings: LogRings,
    vllm: VllmHost | None,
    stack: AsyncExitStack,
) -> InstanceContext:
    scratch = Path(tempfile.gettempdir()) / f"hypercast-handlers-{setup.config.cluster_id}"
    return InstanceContext(
        arena=images.arena,
        device_cache=images.device_cache,
        loader=images.loader,
        engines=setup.engines,
        make_handler=_handler_maker(setup.settings),
        scratch_dir=stack.enter_context(scratch_folder(scratch)),
        clock=setup.clock,
        meter=meter,
        loads=LoadFeed(setup.clock),
        log_line=rings.add,
        engine_images=EngineImages(images.loader, setup.state, setup.settings.node_id),
        vllm=vllm,
    )


async def _open_vllm(setup: NodeSetup, memory: _Memory, stack: AsyncExitStack) -> VllmHost | None:
    """Return what the node needs for vLLM, None if it has no vLLM. Raises SettingsError."""
    settings, facts = setup.settings, memory.facts
    if settings.vllm_python is None or is_emulated(facts.device):
        return None
    if not await has_module(settings.vllm_python, "vllm"):
        raise SettingsError(
            f"--vllm-python {settings.vllm_python}: no Python that has vLLM (make install-vllm makes one)"
        )
    parent = Path(tempfile.gettempdir()) / f"hypercast-vllm-{setup.config.cluster_id}"
    scratch_dir = stack.enter_context(scratch_folder(parent))
    zygote = None
    if not settings.no_vllm_preload:
        made = make_zygote(settings.vllm_python, facts.device, scratch_dir / "zygote")
        zygote = await stack.enter_async_context(made.running())
    return VllmHost(
        python=settings.vllm_python,
        memory_bytes=settings.vllm_memory_bytes or default_vllm_bytes(settings.nodes_hint),
        device=facts.device,
        scratch_dir=scratch_dir,
        folders=_open_folders(memory.tier, stack),
        attach=socket_path(setup.root, settings.node_id)
        if await has_module(settings.vllm_python, "hypercast_vllm")
        else None,
        zygote=zygote,
    )


def _handler_maker(settings: Settings) -> MakeHandler | None:
    if not settings.allow_handlers:
        return None
    for part in settings.sandbox.missing():
        log.warning("handlers are not confined: this machine lacks %s", part)
    return partial(HandlerProcess, sandbox=settings.sandbox)


async def _open_servers(
    setup: NodeSetup,
    node: Node,
    calls: Calls,
    casting: _Casting,
    engine_images: EngineImages,
    stack: AsyncExitStack,
) -> ChannelServer:
    settings = setup.settings
    await stack.enter_async_context(casting.regions)
    await stack.enter_async_context(casting.listener)
    channel = ChannelServer(
        TcpAddress(settings.listen_host, settings.listen_port).url,
        settings.secret,
        node.handle,
        tls=setup.channel_tls.server,
        translate=remote_error,
        on_peer_closed=lambda peer, _: calls.peer_closed(peer),
    )
    await stack.enter_async_context(channel)
    attach = AttachServer(socket_path(setup.root, settings.node_id), engine_images.open)
    await stack.enter_async_context(attach.listening())
    port = parse_url(channel.url).port
    node.listening(TcpAddress(settings.advertise, port).url, casting.regions.address.url)
    return channel


async def _open_accounting(setup: NodeSetup, stack: AsyncExitStack) -> _Accounting:
    settings = setup.settings
    journals = setup.root / ".journals"  # not a valid host id
    if settings.journal_dir is not None:
        journals = settings.journal_dir / setup.root.name
    meter, journal = await run_in_thread(_make_meter, settings.node_id, setup.epoch, journals, setup.clock)
    stack.callback(lambda: journal.close(remove=meter.is_settled))
    publisher = Publisher(setup.state, setup.epoch, settings.lease_s, meter)
    meter.on_record(publisher.ledger_changed)
    calls = Calls(meter, setup.clock.monotonic_s)
    return _Accounting(counters=Counters(), meter=meter, calls=calls, publisher=publisher)


async def _open_memory(setup: NodeSetup, stack: AsyncExitStack) -> _Memory:
    settings = setup.settings
    facts = await run_in_thread(detect_device, settings.device)
    set_compute_threads(settings.threads or max(1, usable_cores() // settings.nodes_hint))
    arena = _make_arena(settings, facts)
    stack.callback(arena.close)
    tier = await run_in_thread(_make_tier, settings, setup.root / settings.host_id)
    stack.callback(tier.close)
    return _Memory(facts=facts, arena=arena, tier=tier, folders=_open_folders(tier, stack))


def _open_folders(tier: HostTier, stack: AsyncExitStack) -> ModelFolders:
    folders = ModelFolders(tier, stack.enter_context(scratch_folder(tier.directory / MODELS)))
    stack.callback(folders.close_all)
    return folders


def _open_casting(setup: NodeSetup, arena: Arena, stack: AsyncExitStack) -> _Casting:
    settings = setup.settings
    transports = open_transports(settings, arena, stack)
    regions = RegionServer(
        settings.secret,
        TcpAddress(settings.listen_host, settings.cast_port).url,
        settings.host_id,
        advertise=settings.advertise,
        link_rate_bytes_s=settings.link_rate_bytes_s,
        tls=transports.tls.server,
        exporters=transports.exporters,
    )
    links = CastLinks(
        connector=make_connector(settings, setup.root, transports),
        watcher=RegionWatcher(settings.secret, tls=transports.tls.client, keeps=True),
    )
    stack.push_async_callback(links.aclose)
    address = settings.listen_host, settings.stage_port, settings.advertise
    listener = StageListener(*address, settings.host_id, settings.secret, transports.tls)
    return _Casting(regions=regions, listener=listener, links=links, transports=transports)


async def _load_sources(
    setup: NodeSetup, casting: _Casting, accounting: _Accounting, device_cache: DeviceCache
) -> LoadSources:
    settings, config = setup.settings, setup.config
    casts = CastContext(
        node=settings.node_id,
        links=casting.links,
        counters=accounting.counters,
        clock=setup.clock,
        publish=accounting.publisher.cast_changed,
    )
    return LoadSources(
        node=settings.node_id,
        host=settings.host_id,
        store=await reach_store(settings.store_url or config.store_url, config.cluster_id),
        casts=casts,
        device_buffer=device_cache.buffer,
    )


def _make_meter(node: str, epoch: int, folder: Path, clock: Clock) -> tuple[GpuMeter, MeterJournal]:
    """Create the node's meter, with unsent records recovered from the journals of dead nodes."""
    journal, orphans = MeterJournal(folder, node, epoch), recover_journals(folder)
    meter = GpuMeter(
        node,
        epoch,
        now_us=lambda: int(clock.monotonic_s() * 1e6),
        wall_s=clock.wall_s(),
        journal=journal,
        unsent=[record for one in orphans for record in one.records],
    )
    discard_recovered(orphans, journal)
    return meter, journal


def _make_arena(settings: Settings, facts: DeviceFacts) -> Arena:
    nbytes = settings.gpu_memory_bytes or default_arena_bytes(facts, settings.nodes_hint)
    log.info("arena: %d bytes on %s (%s)", nbytes, facts.device, facts.gpu_type)
    if facts.device == "cpu":
        return CpuArena(nbytes)
    if is_emulated(facts.device):
        return EmulatedArena(parse_device(facts.device), nbytes)
    return CudaArena(int(facts.device.partition(":")[2]), nbytes)


def _make_tier(settings: Settings, folder: Path) -> HostTier:
    nbytes = settings.host_memory_bytes or default_host_bytes(settings.shm_dir, settings.nodes_hint)
    spare_bytes = settings.spare_memory_bytes
    if spare_bytes is None:
        spare_bytes = default_spare_bytes(nbytes, settings.nodes_hint)
    return HostTier(folder, nbytes, spare_bytes=spare_bytes)
