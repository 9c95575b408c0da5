"""The health check of Redis, and the price table that it keeps fresh off the request path."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from gateway.core.errors import Unavailable
from registry.accounting.prices import DEFAULT_RATES, rate_for
from registry.errors import NotFound, StateUnavailable
from registry.records.usage import PriceRate
from registry.state import State

_log = logging.getLogger("hypercast.gateway")

_PERIOD_S = 0.5
_TIMEOUT_S = 1.5  # so that a silent Redis is noticed within two seconds
_RATES_PERIODS = 10


class HealthCheck:
    """Whether Redis answers, as of the last probe or ledger write; `rates` as of the last few seconds.

    `refill` stores again what every cluster needs; it is called if Redis was emptied.
    """

    def __init__(self, state: State, refill: Callable[[], Awaitable[None]] | None = None) -> None:
        self._state = state
        self._refill = refill
        self.alive = False
        self.reason = "not probed yet"  # why not alive, in Redis' words where it gave any
        self.rates: Sequence[PriceRate] = ()
        self._found: dict[str, PriceRate] = {}
        self._found_in: Sequence[PriceRate] = self.rates

    def __repr__(self) -> str:
        return f"<HealthCheck {'alive' if self.alive else self.reason!r} rates={len(self.rates)}>"

    @property
    def currency(self) -> str:
        """The currency of the price table."""
        return (self.rates or DEFAULT_RATES)[0].currency

    def rate(self, gpu_type: str) -> PriceRate:
        """Return the rate in force for a GPU type. Raises NotFound."""
        if self._found_in is not self.rates:
            self._found_in, self._found = self.rates, {}
        rate = self._found.get(gpu_type)
        if rate is None:
            rate = self._found[gpu_type] = rate_for(gpu_type, self.rates or DEFAULT_RATES)
        return rate

    async def probe(self, *, rates: bool) -> None:
        """Ping Redis once, and read the price table with `rates`."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._state.ping()
                if rates:
                    await self._read_rates()
        except TimeoutError:
            self.report(alive=False, reason=f"no answer within {_TIMEOUT_S:g} s")
        except StateUnavailable as error:
            self.report(alive=False, reason=str(error))
        else:
            self.report(alive=True)

    async def _read_rates(self) -> None:
        if self._refill is not None:
            try:
                await self._state.cluster_config()
            except NotFound:
                _log.error("Redis was emptied: deploy the functions again, or restore a backup")
                await self._refill()
        self.rates = await self._state.rates()

    async def run(self) -> None:
        """Probe until cancelled."""
        probes = 0
        while True:
            await self.probe(rates=not self.alive or probes % _RATES_PERIODS == 0)
            probes += 1
            await asyncio.sleep(_PERIOD_S)

    def report(self, *, alive: bool, reason: str = "") -> None:
        """Record what a caller found by itself."""
        if alive != self.alive:
            if alive:
                _log.info("Redis is available")
            else:
                _log.warning("Redis is unavailable: %s", reason)
        self.alive = alive
        self.reason = "" if alive else reason

    def require_alive(self) -> None:
        """Raise Unavailable while no request could be billed: such a request is not started."""
        if not self.alive:
            raise Unavailable(
                f"Redis is unavailable ({self.reason}): the request was not started",
                code="state_unavailable",
                retry_after_s=1,
            )
