"""What the handlers work with, put together once at the start."""

from dataclasses import dataclass

from gateway.assets import AssetCache
from gateway.auth import Authenticator
from gateway.billing import Biller
from gateway.contract import Blobs, Cluster, Dispatcher, Settled
from gateway.drain import Gate
from gateway.functions import Functions
from gateway.metrics import Metrics
from gateway.places import Places
from gateway.pulse import Pulse
from gateway.quotas import Quotas
from gateway.settings import GatewaySettings
from registry.clock import Clock
from registry.state import Ledger, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One gateway's parts. `make_services` builds it; `aclose` ends what it began."""

    settings: GatewaySettings
    state: State
    blobs: Blobs
    dispatcher: Dispatcher
    cluster: Cluster
    clock: Clock
    metrics: Metrics
    pulse: Pulse
    gate: Gate
    auth: Authenticator
    quotas: Quotas
    places: Places
    functions: Functions
    assets: AssetCache
    biller: Biller

    async def aclose(self) -> None:
        """Finish bills under way and stop loads; what was passed in is its owner's."""
        await self.biller.aclose()
        await self.places.aclose()
        await self.assets.aclose()


def make_services(
    *,
    settings: GatewaySettings,
    state: State,
    blobs: Blobs,
    dispatcher: Dispatcher,
    cluster: Cluster,
    clock: Clock,
    settled: Settled,
    metrics: Metrics | None = None,
    ledger: Ledger | None = None,
) -> Services:
    """Build the parts that the gateway's HTTP side owns around those that it is given. Requests are billed
    to `ledger`, by default the state's own."""
    pulse, places = Pulse(state), Places(state, clock)
    biller = Biller(ledger or state, pulse, clock, settled)
    metrics = metrics or Metrics(cluster.view)
    metrics.spooled.set_function(lambda: len(biller.spool))
    return Services(
        settings=settings,
        state=state,
        blobs=blobs,
        dispatcher=dispatcher,
        cluster=cluster,
        clock=clock,
        metrics=metrics,
        pulse=pulse,
        gate=Gate(settings.max_in_flight),
        auth=Authenticator(state, clock, cache_s=settings.key_cache_s),
        quotas=Quotas(state, places, pulse, clock),
        places=places,
        functions=Functions(cluster, state, clock),
        assets=AssetCache(blobs),
        biller=biller,
    )
