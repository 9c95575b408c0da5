"""Run one gateway of a cluster: `python -m gateway`."""

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import uvloop
from setproctitle import setproctitle

from gateway.api.app import make_app, make_metrics_app
from gateway.api.blob_collector import BlobCollector
from gateway.billing.request_record import Biller
from gateway.cluster.cast_tracker import CastEnded
from gateway.cluster.dialer import channel_dialer
from gateway.control.assembly import Control, ControlSettings, make_control
from gateway.control.daily_archive import ArchiveLag, DailyArchive
from gateway.core.audit_writer import AuditWriter
from gateway.core.settings import GatewaySettings, parse
from gateway.http.audit_file import write_audit_lines
from gateway.http.connections import raise_descriptor_limit
from gateway.http.metrics import ControlFacts, Metrics
from gateway.http.metrics_listener import metrics_listener
from gateway.http.server import GatewayServer
from gateway.jobs.service import JobService
from gateway.requests.services import Services, make_services
from gateway.requests.spans import cast_span
from gateway.tenants.state_health import HealthCheck
from rdmacast.aio.loop_lag import limit_loop_lag, watch_loop_lag
from registry.accounting.prices import ensure_default_rates
from registry.archive.archive import LedgerArchive
from registry.clock import SystemClock
from registry.config.secrets import ADMIN_TENANT, load_or_create_admin_key, parse_key
from registry.config.tls import open_tls
from registry.errors import NewerSchema, RegistryError, StateUnavailable
from registry.images.store import BlobStore, open_store
from registry.logs.lines import configure_logs
from registry.redis.state import RedisState
from registry.state import ClusterConfig, State
from registry.tracing.otlp import open_tracer
from registry.tracing.span import Tracer

_log = logging.getLogger("hypercast.gateway")

_STATE_WAIT_S = 60.0
_RETRY_S = 0.2


async def prepare(
    settings: GatewaySettings, state: State, store: BlobStore, audit: AuditWriter
) -> ClusterConfig:
    """Set up the cluster's configuration, store owner, admin key and price table unless they exist.

    Retries for up to a minute while Redis is starting. Raises StateUnavailable after that.
    """
    config = await _cluster_config(state, store)
    owner = await store.claim(config.cluster_id)
    if owner != config.cluster_id:
        # A new Redis with an old store: the blobs are content-addressed, so they stay valid, but nodes
        # compare this owner to detect that they read another store.
        _log.warning("the store %s belongs to cluster %s, not %s", store.url, owner, config.cluster_id)
    await fill(settings, state, config, audit)
    return config


async def fill(settings: GatewaySettings, state: State, config: ClusterConfig, audit: AuditWriter) -> None:
    """Store the cluster's configuration, the admin key and the price table unless they exist."""
    await state.cluster_config(config)
    if settings.admin_key_file is not None:
        known = {key.id for key in await state.keys()}
        made = parse_key(await load_or_create_admin_key(settings.admin_key_file, state)).id
        if made not in known:
            await audit.end(await audit.begin_own("key.create", ADMIN_TENANT), 201, made=made)
    await ensure_default_rates(state)


async def _cluster_config(state: State, store: BlobStore) -> ClusterConfig:
    deadline = asyncio.get_running_loop().time() + _STATE_WAIT_S
    reported = ""
    while True:
        try:
            return await state.cluster_config(
                ClusterConfig(cluster_id=secrets.token_hex(8), store_url=store.url)
            )
        except NewerSchema:
            raise
        except StateUnavailable as error:
            if asyncio.get_running_loop().time() > deadline:
                raise
            if str(error) != reported:
                reported = str(error)
                _log.info("waiting for the shared state: %s", reported)
            await asyncio.sleep(_RETRY_S)


async def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM."""
    clock, store = SystemClock(), open_store(settings.store)
    gateway_id = settings.gateway_id or f"gateway-{secrets.token_hex(4)}"
    settings = replace(settings, gateway_id=gateway_id)
    async with AsyncExitStack() as stack:
        tracer = open_tracer(settings.tracing, "hypercast-gateway", gateway_id)
        if tracer is not None:
            stack.push_async_callback(tracer.aclose)
        state = await stack.enter_async_context(
            RedisState.connect(
                settings.redis_url,
                password=settings.redis_password,
                wait_replicas=settings.redis_wait_replicas,
                tls=settings.tls.redis,
            )
        )
        audit = AuditWriter(state, clock, gateway_id)
        config = await prepare(settings, state, store, audit)
        health = HealthCheck(state, partial(fill, settings, state, config, audit))
        archive = LedgerArchive.open(state, store, clock)
        stack.push_async_callback(archive.aclose)
        lag = ArchiveLag(clock)
        control = await stack.enter_async_context(
            make_control(
                state=state,
                blobs=store,
                dial=channel_dialer(settings.secret, open_tls(settings.tls.channel, "channels").client),
                gateway_id=gateway_id,
                clock=clock,
                settings=ControlSettings(
                    cast_plan=settings.cast_plan,
                    link_bytes_s=settings.link_bytes_s,
                    served_copies_bytes=settings.served_copies_bytes,
                    moves_on_drain=settings.moves_on_drain,
                    cluster_secret=settings.secret,
                ),
                daily_archive=partial(DailyArchive, archive.archiver, audit=audit, lag=lag),
            )
        )
        services = make_services(
            settings=settings,
            state=state,
            blobs=store,
            dispatcher=control.dispatcher,
            cluster=control.cluster,
            clock=clock,
            biller=Biller(archive.ledger, health, clock, control.settlement.add),
            metrics=Metrics(
                control.cluster.view,
                lambda: control_facts(control),
                clock=clock,
                archive_lag_s=lag.seconds,
                vllm_names=settings.vllm_metrics,
                tenants=settings.tenant_metrics,
            ),
            tracer=tracer,
        )
        stack.push_async_callback(services.aclose)
        control.state_cache.subscribe_ready(services.metrics.note_start)
        control.state_cache.cast_tracker.subscribe(services.metrics.note_cast)
        if tracer is not None:
            control.state_cache.cast_tracker.subscribe(partial(record_cast, tracer, control))
        collector = BlobCollector(
            store,
            state,
            clock,
            grace_s=settings.blob_grace_s,
            also_used=partial(_used_blobs, archive, state),
            is_kept=archive.files.is_archive,
        )
        app = make_app(services, collector, archive)
        jobs = JobService(services, app, lambda: control.leads)
        server = GatewayServer(app, services.limiter, settings)
        if settings.metrics_port is not None:
            metrics_app = make_metrics_app(services, collector)
            listener = metrics_listener(metrics_app, settings.metrics_host, settings.metrics_port)
            port = await stack.enter_async_context(listener)
            _log.info("metrics on http://%s:%d/metrics", settings.metrics_host, port)
        await services.health.probe(rates=True)
        await control.ready.wait()
        await _serve(server, services, collector, audit, jobs)
    _log.info("%s: stopped", gateway_id)


async def _used_blobs(archive: LedgerArchive, state: State) -> frozenset[str]:
    """Return the digests of the archive and of the files of tenants."""
    return await archive.digests() | await state.file_digests()


async def _serve(
    server: GatewayServer,
    services: Services,
    collector: BlobCollector,
    audit: AuditWriter,
    jobs: JobService,
) -> None:
    """Run the server beside its background tasks until it has drained."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(services.health.run(), name="health"),
            group.create_task(services.leases.run(), name="leases"),
            group.create_task(services.watch.run(), name="watch"),
            group.create_task(services.biller.outbox.run(), name="outbox"),
            group.create_task(collector.run(audit), name="blob collector"),
            group.create_task(jobs.run(), name="jobs"),
            group.create_task(
                watch_loop_lag(_log, partial(services.metrics.loop_lag.observe, ())), name="loop lag"
            ),
        ]
        try:
            await server.serve_and_drain()
        finally:
            for task in tasks:
                task.cancel()


def record_cast(tracer: Tracer, control: Control, end: CastEnded) -> None:
    """Record the span of a cast that has ended, on the gateway that leads: all of them follow it."""
    if control.stats().controller_epoch is not None:
        tracer.record(cast_span(end))


def control_facts(control: Control) -> ControlFacts:
    """Return the figures of the control side that metrics export."""
    stats = control.stats()
    return ControlFacts(
        failovers=stats.failovers,
        moved=stats.moved,
        desired=stats.desired,
        nodes=control.node_demands(),
        generation=control.generation_loads(),
    )


def main(argv: Sequence[str]) -> int:
    """Run the gateway; return the process's exit code."""
    os.umask(0o077)
    settings = parse(argv)
    configure_logs(settings.log_level, settings.log_format, settings.gateway_id or "gateway")
    raise_descriptor_limit()
    limit_loop_lag()
    try:
        write_audit_lines(settings.audit_file)
        uvloop.run(run(settings))
    except RegistryError as error:
        _log.error("cannot start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    setproctitle("hypercast gateway")
    sys.exit(main(sys.argv[1:]))
