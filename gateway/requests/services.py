"""The dependencies of the HTTP handlers, built once at start."""

from dataclasses import dataclass

from gateway.billing.request_record import Biller
from gateway.core.audit_writer import AuditWriter
from gateway.core.contract import ClusterOperations
from gateway.core.executors import Executors, make_executors
from gateway.core.job_events import JobEvents
from gateway.core.open_call import Dispatcher
from gateway.core.request_context import RequestContext
from gateway.core.request_trace import RequestTracing
from gateway.core.settings import GatewaySettings
from gateway.http.drain import InFlightLimiter
from gateway.http.metrics import Metrics
from gateway.inference.assets import AssetCache, ModelAssets
from gateway.inference.tokenization import Encoder
from gateway.requests.change_log import ChangeLog
from gateway.requests.functions import FunctionResolver
from gateway.requests.shadows import ShadowRequests
from gateway.tenants.auth import Authenticator
from gateway.tenants.concurrency_leases import ConcurrencyLeases
from gateway.tenants.quotas import Quotas
from gateway.tenants.state_health import HealthCheck
from gateway.watch.hub import WatchHub
from registry.clock import Clock
from registry.config.function_secrets import SecretVault
from registry.images.store import Blobs
from registry.records.function import FunctionVersion
from registry.state import State
from registry.tracing.span import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of one gateway. `make_services` builds it; `aclose` ends what it started."""

    settings: GatewaySettings
    state: State
    blobs: Blobs
    dispatcher: Dispatcher
    cluster: ClusterOperations
    clock: Clock
    metrics: Metrics
    health: HealthCheck
    limiter: InFlightLimiter
    auth: Authenticator
    quotas: Quotas
    leases: ConcurrencyLeases
    functions: FunctionResolver
    assets: AssetCache
    biller: Biller
    executors: Executors
    vault: SecretVault
    changes: ChangeLog
    shadows: ShadowRequests
    watch: WatchHub
    job_events: JobEvents
    tracing: RequestTracing | None = None

    def encoder(self, version: FunctionVersion, assets: ModelAssets, context: RequestContext) -> Encoder:
        """Return the encoder of a request's texts."""
        inline_chars, tenant = self.settings.limits.inline_chars, context.caller.tenant
        return Encoder(version, assets, self.executors.text, tenant, inline_chars=inline_chars)

    async def aclose(self) -> None:
        """Finish ledger writes, stop shadow requests and asset loads.

        Arguments of `make_services` are not closed.
        """
        await self.shadows.aclose()
        await self.biller.aclose()
        await self.leases.aclose()
        await self.assets.aclose()
        self.executors.close()


def make_services(
    *,
    settings: GatewaySettings,
    state: State,
    blobs: Blobs,
    dispatcher: Dispatcher,
    cluster: ClusterOperations,
    clock: Clock,
    biller: Biller,
    metrics: Metrics | None = None,
    tracer: Tracer | None = None,
) -> Services:
    """Build the HTTP side's parts."""
    health, leases = biller.health, ConcurrencyLeases(state, clock)
    metrics = metrics or Metrics(
        cluster.view, clock=clock, vllm_names=settings.vllm_metrics, tenants=settings.tenant_metrics
    )
    functions = FunctionResolver(cluster, state, clock)
    limiter = InFlightLimiter(settings.max_in_flight, settings.body_memory_bytes)
    metrics.outbox_records.set_function(lambda: len(biller.outbox))
    return Services(
        settings=settings,
        state=state,
        blobs=blobs,
        dispatcher=dispatcher,
        cluster=cluster,
        clock=clock,
        metrics=metrics,
        health=health,
        limiter=limiter,
        shadows=ShadowRequests(functions, limiter, metrics, clock),
        auth=Authenticator(state, clock, cache_s=settings.key_cache_s),
        quotas=Quotas(state, leases, health, clock),
        leases=leases,
        functions=functions,
        assets=AssetCache(blobs),
        biller=biller,
        executors=make_executors(),
        vault=SecretVault(state, settings.secret),
        watch=WatchHub(cluster, clock, settings.gateway_id),
        tracing=None if tracer is None else RequestTracing(tracer, settings.tracing, clock.monotonic_s),
        job_events=JobEvents(state),
        changes=ChangeLog(AuditWriter(state, clock, settings.gateway_id), clock, metrics, settings.limits),
    )
