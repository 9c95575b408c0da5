"""`python -m gateway`: one gateway of a cluster."""

import asyncio
import gc
import logging
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop

from gateway.app import make_app
from gateway.blob_keeper import BlobKeeper
from gateway.control import Control, ControlSettings, make_control
from gateway.dialing import channel_dial
from gateway.metrics import ControlFacts, Metrics
from gateway.server import GatewayServer
from gateway.services import make_services
from gateway.settings import GatewaySettings, parse
from registry.clock import SystemClock
from registry.errors import RegistryError, StateUnavailable
from registry.images.store import BlobStore, open_store
from registry.prices import ensure_default_rates
from registry.redis_state import RedisState
from registry.secrets import load_or_create_admin_key
from registry.state import ClusterConfig, State

_log = logging.getLogger("hypercast.gateway")

_WAIT_S = 60.0
_RETRY_S = 0.2


async def prepare(settings: GatewaySettings, state: State, store: BlobStore) -> None:
    """What the first gateway of a cluster sets up, and every other finds: its configuration, the mark
    on the store, the admin key, the price table. Waits a while for Redis to come up."""
    deadline = asyncio.get_running_loop().time() + _WAIT_S
    told = ""
    while True:
        try:
            config = await state.cluster_config(
                ClusterConfig(cluster_id=secrets.token_hex(8), store_url=store.url)
            )
            break
        except StateUnavailable as error:
            if asyncio.get_running_loop().time() > deadline:
                raise
            if str(error) != told:
                told = str(error)
                _log.info("waiting for the shared state: %s", told)
            await asyncio.sleep(_RETRY_S)
    owner = await store.claim(config.cluster_id)
    if owner != config.cluster_id:
        # A new Redis over an old store: the blobs are content-addressed, so they are good; but nodes
        # tell by this mark whether they read the same store, so say what is amiss.
        _log.warning("the store %s belongs to cluster %s, not %s", store.url, owner, config.cluster_id)
    if settings.admin_key_file is not None:
        await load_or_create_admin_key(settings.admin_key_file, state)
    await ensure_default_rates(state)


async def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM."""
    clock, store = SystemClock(), open_store(settings.store)
    gateway_id = settings.gateway_id or f"gateway-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        state = await stack.enter_async_context(RedisState.connect(settings.redis_url))
        await prepare(settings, state, store)
        control = await stack.enter_async_context(
            make_control(
                state=state,
                blobs=store,
                dial=channel_dial(settings.secret),
                gateway_id=gateway_id,
                clock=clock,
                settings=ControlSettings(cast_plan=settings.cast_plan, link_bytes_s=settings.link_bytes_s),
            )
        )
        services = make_services(
            settings=settings,
            state=state,
            blobs=store,
            dispatcher=control.dispatcher,
            cluster=control.cluster,
            clock=clock,
            settled=control.settlement.note,
            metrics=Metrics(control.cluster.view, lambda: control_facts(control)),
        )
        stack.push_async_callback(services.aclose)
        control.directory.each_start(services.metrics.note_start)
        control.directory.cast_ends.each(services.metrics.note_cast)
        keeper = BlobKeeper(store, state, clock, holder=gateway_id, grace_s=settings.blob_grace_s)
        server = GatewayServer(make_app(services, keeper), services.gate, settings)
        await services.pulse.beat(rates=True)
        await control.ready.wait()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(services.pulse.run(), name="pulse"),
                group.create_task(services.places.run(), name="places"),
                group.create_task(services.biller.spool.run(), name="spool"),
                group.create_task(keeper.run(), name="blob keeper"),
            ]
            try:
                await server.serve_and_drain()
            finally:
                for task in tasks:
                    task.cancel()
    _log.info("%s has left", gateway_id)


def control_facts(control: Control) -> ControlFacts:
    stats = control.stats()
    return ControlFacts(failovers=stats.failovers, moved=stats.moved, desired=stats.desired)


def main(argv: Sequence[str]) -> int:
    """Run the gateway; returns the process's exit code."""
    settings = parse(argv)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # Requests make objects that soon go by themselves: to search for cycles after every 700 is a waste.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        uvloop.run(run(settings))
    except RegistryError as error:
        _log.error("cannot start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
