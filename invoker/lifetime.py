"""The life of a node's process: it waits for its cluster, serves until it is stopped, drains and leaves."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial

from invoker.assembly.node import assemble
from invoker.assembly.setup import MakeArena, NodeSetup
from invoker.engine.factory import EngineFactory
from invoker.loading.disk_cache import SpaceOf, disk_space
from invoker.loading.fetch_order import LoadSources
from invoker.publisher import BACKOFF_S, Publisher
from invoker.settings import Settings
from invoker.traces.node import NodeTracing
from invoker.watchdog import watch_steps
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.loop_lag import watch_loop_lag
from registry.clock import Clock, SystemClock
from registry.config.tls import open_tls
from registry.errors import NewerSchema, NotFound, StateUnavailable
from registry.state import ClusterConfig, State
from registry.tracing.otlp import open_tracer
from registry.tracing.span import Tracer

LEAVE_TIMEOUT_S = 5.0  # for the last update of the registry
EXIT_HANGING = 70  # exit code after an engine hung

log = logging.getLogger("invoker.lifetime")


async def run_node(
    settings: Settings,
    state: State,
    engines: EngineFactory,
    stop: asyncio.Event,
    clock: Clock | None = None,
    limit_sources: Callable[[LoadSources], LoadSources] = lambda sources: sources,
    make_arena: MakeArena | None = None,
    tracer: Tracer | None = None,
    space_of: SpaceOf = disk_space,
) -> None:
    """Run a node until `stop` is set; then drain, leave the cluster and return.

    It loads images from what `limit_sources` returns for its sources, into the arena of `make_arena`, if any.
    Without a `tracer` its spans go where its settings say. `space_of` returns the space of its disk tier's
    file system.

    Raises StaleEpoch if another process has taken the node's id; SettingsError, HostTierError or OSError if
    it cannot start.
    """
    config = await _cluster_config(state, stop)
    if config is None:
        return
    epoch = await state.next_node_epoch(settings.node_id)
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        tracer = tracer or open_tracer(settings.tracing, "hypercast-node", settings.node_id)
        if tracer is not None:
            stack.push_async_callback(tracer.aclose)
        setup = NodeSetup(
            settings=settings,
            state=state,
            engines=engines,
            config=config,
            epoch=epoch,
            clock=clock,
            channel_tls=open_tls(settings.tls.channel, "channels"),
            limit_sources=limit_sources,
            make_arena=make_arena,
            space_of=space_of,
            tracing=None if tracer is None else NodeTracing(tracer, clock),
        )
        node, publisher, channel = await assemble(setup, stack)
        log.info("node %s (epoch %d): serving at %s", settings.node_id, epoch, channel.url)
        publishing = asyncio.create_task(publisher.run(node.record), name="publisher")
        stack.callback(asyncio.create_task(node.keep_metering(), name="metering").cancel)
        watching = watch_steps(
            node.longest_step_us, settings.step_timeout_s, partial(_abort, settings.node_id, epoch, state)
        )
        stack.callback(asyncio.create_task(watching, name="watchdog").cancel)
        stack.callback(asyncio.create_task(watch_loop_lag(log), name="loop lag").cancel)
        try:
            await _wait_for_either(publishing, asyncio.create_task(_until(stop)))
            if not publishing.done():
                log.info("node %s: draining", settings.node_id)
                await _wait_for_either(publishing, asyncio.create_task(node.drain()))
                await _leave(settings, state, epoch, publisher, publishing)
        finally:
            await cancel_and_wait(publishing)
        if not publishing.cancelled():
            publishing.result()


async def _cluster_config(state: State, stop: asyncio.Event) -> ClusterConfig | None:
    """Wait for a gateway to set the cluster's configuration; None if `stop` is set before."""
    tries = 0
    while not stop.is_set():
        try:
            return await state.cluster_config()
        except NewerSchema:
            raise
        except (StateUnavailable, NotFound) as error:
            if not tries:
                log.warning("waiting for the cluster's configuration: %s", error)
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
    """Publish the last state and remove the node; if the registry is unavailable, its lease expires."""
    publisher.close()
    try:
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await asyncio.wait([publishing])
            await state.remove_node(settings.node_id, epoch)
    except (TimeoutError, StateUnavailable) as error:
        log.warning("cannot remove the node from the registry, its lease will expire: %s", error)


async def _abort(node: str, epoch: int, state: State) -> None:
    """End the process because a thread hangs; unsent ledger records are in its journal."""
    with suppress(TimeoutError, StateUnavailable):
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await state.remove_node(node, epoch)
    os._exit(EXIT_HANGING)


async def _wait_for_either(publishing: asyncio.Task[None], other: asyncio.Task[None]) -> None:
    """Wait until either task ends; raise the exception of `other`, not that of `publishing`."""
    await asyncio.wait([publishing, other], return_when=asyncio.FIRST_COMPLETED)
    if not other.done():
        await cancel_and_wait(other)
    elif not other.cancelled():
        other.result()
