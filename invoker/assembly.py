"""Puts a node together, runs it until it is told to leave, and takes it apart again."""

import asyncio
import logging
import os
import tempfile
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from invoker.arena import Arena, CpuArena
from invoker.calls import Calls
from invoker.cast_ends import make_connector, open_ends
from invoker.cast_fetch import CastGear
from invoker.counters import Counters
from invoker.cuda_arena import CudaArena
from invoker.device import (
    DeviceFacts,
    default_arena_bytes,
    default_host_bytes,
    default_spare_bytes,
    find_device,
    usable_cores,
)
from invoker.emulated.arena import EmulatedArena
from invoker.engine.compute_threads import set_compute_threads
from invoker.engines import Engines
from invoker.handlers.process import HandlerProcess
from invoker.host_tier import HostTier
from invoker.instances import Instances
from invoker.loader import ImageLoader
from invoker.log_rings import LogRings
from invoker.meter import GpuMeter
from invoker.meter_journal import MeterJournal, adopt, discard
from invoker.node import Node, Parts
from invoker.published import PublishedImages
from invoker.publisher import BACKOFF_S, Publisher
from invoker.residents import Residents
from invoker.scratch import scratch_folder
from invoker.settings import Settings
from invoker.stages.door import Door
from invoker.stages.engines import StageGear
from invoker.stages.heads import Pipelines
from invoker.stages.hosted import HostedStages
from invoker.stages.kv_moves import KvMoves
from invoker.starting import Equipment
from invoker.store_access import reach_store
from invoker.threads import in_thread
from invoker.watchdog import watch_steps
from rdmacast.address import Endpoint, parse_url
from rdmacast.region_server import RegionServer
from rdmacast.watching import RegionWatcher
from registry.channel import ChannelServer
from registry.clock import Clock, SystemClock
from registry.emulation import is_emulated, parse_device
from registry.errors import NotFound, StateUnavailable
from registry.state import ClusterConfig, State

LEAVE_S = 5.0  # for the last words to the shared state
HANGS = 70  # exit code of a process that had to end itself

log = logging.getLogger("invoker.assembly")


async def run_node(
    settings: Settings, state: State, engines: Engines, stop: asyncio.Event, clock: Clock | None = None
) -> None:
    """Be a node until `stop` is set: then drain, leave the cluster and return.

    Raises StaleEpoch when another process has taken the node's id; SettingsError, HostTierError and
    OSError when it cannot start.
    """
    config = await _cluster_config(state, stop)
    if config is None:
        return
    epoch = await state.next_node_epoch(settings.node_id)
    async with AsyncExitStack() as stack:
        node, publisher, channel = await _assemble(
            settings, state, engines, config, epoch, clock or SystemClock(), stack
        )
        log.info("node %s (epoch %d) serves at %s", settings.node_id, epoch, channel.url)
        publishing = asyncio.create_task(publisher.run(node.record), name="publisher")
        stack.callback(asyncio.create_task(node.keep_metering(), name="metering").cancel)
        watching = watch_steps(
            node.longest_step_us, settings.step_timeout_s, partial(_give_up, settings.node_id, epoch, state)
        )
        stack.callback(asyncio.create_task(watching, name="watchdog").cancel)
        try:
            await _first(publishing, asyncio.create_task(_until(stop)))
            if not publishing.done():
                log.info("node %s leaves: draining", settings.node_id)
                await _first(publishing, asyncio.create_task(node.drain()))
                await _leave(settings, state, epoch, publisher, publishing)
        finally:
            publishing.cancel()
            await asyncio.wait([publishing])
        if not publishing.cancelled():
            publishing.result()


async def _assemble(
    settings: Settings,
    state: State,
    engines: Engines,
    config: ClusterConfig,
    epoch: int,
    clock: Clock,
    stack: AsyncExitStack,
) -> tuple[Node, Publisher, ChannelServer]:
    facts = await in_thread(find_device, settings.device)
    set_compute_threads(settings.threads or max(1, usable_cores() // settings.nodes_hint))
    store = await reach_store(settings.store_url or config.store_url, config.cluster_id)
    arena = _make_arena(settings, facts)
    stack.callback(arena.close)
    root = settings.shm_dir / f"hypercast-{config.cluster_id}"
    tier = await in_thread(_make_tier, settings, root / settings.host_id)
    stack.callback(tier.close)
    rate = settings.link_rate_bytes_s
    ends = open_ends(settings, arena, stack)
    regions = RegionServer(
        settings.secret,
        Endpoint(settings.listen_host, settings.cast_port).url,
        settings.host_id,
        advertise=settings.advertise,
        link_rate_bytes_s=rate,
        tls=ends.tls.server,
        verbs=ends.verbs_node,
        lender=ends.lender,
        nixl=ends.nixl_node,
    )
    connector = make_connector(settings, root, ends)
    counters, rings = Counters(), LogRings(clock)
    journals = root / ".journals"  # no host can be called that
    if settings.journal_dir is not None:
        journals = settings.journal_dir / root.name
    meter, journal = await in_thread(_make_meter, settings.node_id, epoch, journals, clock)
    stack.callback(lambda: journal.close(remove=meter.at_rest))
    calls = Calls(meter, clock.monotonic_s)
    publisher = Publisher(state, epoch, settings.lease_s, meter)
    meter.on_due(publisher.record_due)
    residents = Residents(arena, settings.keep_hot_s, clock, publisher.node_changed)
    published = PublishedImages(regions, tier, residents.buffer, residents.gpu_pointer)
    stack.callback(published.close)
    casting = CastGear(
        node=settings.node_id,
        connector=connector,
        watcher=RegionWatcher(settings.secret, tls=ends.tls.client),
        counters=counters,
        clock=clock,
        tell=publisher.cast_changed,
    )
    loader = ImageLoader(
        node=settings.node_id,
        host=settings.host_id,
        tier=tier,
        published=published,
        store=store,
        connector=connector,
        casting=casting,
        in_arena=residents.buffer,
        counters=counters,
        changed=publisher.node_changed,
    )
    scratch = Path(tempfile.gettempdir()) / f"hypercast-handlers-{config.cluster_id}"
    gear = Equipment(
        arena=arena,
        residents=residents,
        loader=loader,
        engines=engines,
        make_handler=HandlerProcess if settings.allow_handlers else None,
        scratch_dir=stack.enter_context(scratch_folder(scratch)),
        clock=clock,
        meter=meter,
        tell=rings.add,
    )
    instances = Instances(settings.node_id, gear, counters, published=publisher.instance_changed)
    door = Door(
        settings.listen_host,
        settings.stage_port,
        settings.advertise,
        settings.host_id,
        settings.secret,
        ends.tls,
    )
    made_with = StageGear(gear=gear, calls=calls, instance=instances.get)
    pipelines = Pipelines(
        settings.node_id, settings.secret, door, made_with, lambda peer: peer in channel.peers
    )
    parts = Parts(
        settings=settings,
        facts=facts,
        clock=clock,
        arena=arena,
        tier=tier,
        residents=residents,
        published=published,
        loader=loader,
        instances=instances,
        stages=HostedStages(door, made_with),
        pipelines=pipelines,
        kv_moves=KvMoves(door, settings.kv_moves),
        meter=meter,
        calls=calls,
        rings=rings,
        counters=counters,
        cast_sent_bytes=lambda: regions.counters["cast_sent_bytes"],
        changed=publisher.node_changed,
    )
    node = Node(parts, epoch)
    stack.push_async_callback(instances.drain, 0.0)
    stack.push_async_callback(parts.pipelines.aclose)
    await stack.enter_async_context(regions)
    await stack.enter_async_context(door)
    channel = ChannelServer(
        Endpoint(settings.listen_host, settings.listen_port).url,
        settings.secret,
        node.handle,
        on_peer_closed=lambda peer, _: calls.peer_closed(peer),
    )
    await stack.enter_async_context(channel)
    port = parse_url(channel.url).port
    node.listening(Endpoint(settings.advertise, port).url, regions.address.url)
    return node, publisher, channel


def _make_meter(node: str, epoch: int, folder: Path, clock: Clock) -> tuple[GpuMeter, MeterJournal]:
    """The node's meter, which begins with what the journals of dead nodes still owe the ledger."""
    journal, adopted = MeterJournal(folder, node, epoch), adopt(folder)
    meter = GpuMeter(
        node,
        epoch,
        now_us=lambda: int(clock.monotonic_s() * 1e6),
        wall_s=clock.wall_s(),
        journal=journal,
        dues=[record for one in adopted for record in one.records],
    )
    discard(adopted, journal)
    return meter, journal


def _make_arena(settings: Settings, facts: DeviceFacts) -> Arena:
    nbytes = settings.gpu_memory_bytes or default_arena_bytes(facts, settings.nodes_hint)
    log.info("taking %d bytes of %s (%s)", nbytes, facts.device, facts.gpu_type)
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


async def _cluster_config(state: State, stop: asyncio.Event) -> ClusterConfig | None:
    """The cluster's configuration, once a gateway has set it; None if told to stop before."""
    tries = 0
    while not stop.is_set():
        try:
            return await state.cluster_config()
        except (StateUnavailable, NotFound) as error:
            if not tries:
                log.warning("waiting for the cluster: %s", error)
            wait_s = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            tries += 1
            try:
                async with asyncio.timeout(wait_s):
                    await stop.wait()
            except TimeoutError:
                continue
    return None


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


async def _leave(
    settings: Settings, state: State, epoch: int, publisher: Publisher, publishing: asyncio.Task[None]
) -> None:
    """Say the last words, then go; a state that does not answer learns of it from the lease."""
    publisher.close()
    try:
        async with asyncio.timeout(LEAVE_S):
            await asyncio.wait([publishing])
            await state.remove_node(settings.node_id, epoch)
    except (TimeoutError, StateUnavailable) as error:
        log.warning("left without a word, the shared state does not answer: %s", error)


async def _give_up(node: str, epoch: int, state: State) -> None:
    """End the process, of which a thread hangs; what it owes the ledger is in its journal."""
    with suppress(TimeoutError, StateUnavailable):
        async with asyncio.timeout(LEAVE_S):
            await state.remove_node(node, epoch)
    os._exit(HANGS)


async def _first(publishing: asyncio.Task[None], other: asyncio.Task[None]) -> None:
    """Return when either ends; the other task's exception is raised, the publisher's is the caller's."""
    await asyncio.wait([publishing, other], return_when=asyncio.FIRST_COMPLETED)
    if not other.done():
        other.cancel()
        await asyncio.wait([other])
    elif not other.cancelled():
        other.result()
