"""Whether the shared state answers, and the price table: kept fresh beside the requests' path."""

import asyncio
import logging
from collections.abc import Sequence

from gateway.errors import Unavailable
from registry.errors import StateUnavailable
from registry.prices import DEFAULT_RATES, rate_for
from registry.state import State
from registry.usage import Rate

_log = logging.getLogger("hypercast.gateway")

_BEAT_S = 0.5
_PATIENCE_S = 1.5  # for an answer: a silent Redis is noticed within two seconds
_RATES_BEATS = 10


class Pulse:
    """`alive` as of the last beat or ledger write; `rates` as of the last few seconds."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.alive = False
        self.rates: Sequence[Rate] = ()
        self._found: dict[str, Rate] = {}
        self._found_in: Sequence[Rate] = self.rates

    def __repr__(self) -> str:
        return f"<Pulse {'alive' if self.alive else 'silent'} rates={len(self.rates)}>"

    def rate(self, gpu_type: str) -> Rate:
        """The rate in force for a device. Raises NotFound."""
        if self._found_in is not self.rates:
            self._found_in, self._found = self.rates, {}
        rate = self._found.get(gpu_type)
        if rate is None:
            rate = self._found[gpu_type] = rate_for(gpu_type, self.rates or DEFAULT_RATES)
        return rate

    async def beat(self, *, rates: bool) -> None:
        """Ask once."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._state.ping()
                if rates:
                    self.rates = await self._state.rates()
        except TimeoutError:
            self.note(alive=False, reason=f"no answer within {_PATIENCE_S:g} s")
        except StateUnavailable as error:
            self.note(alive=False, reason=str(error))
        else:
            self.note(alive=True)

    async def run(self) -> None:
        """Beat until cancelled."""
        beats = 0
        while True:
            await self.beat(rates=not self.alive or beats % _RATES_BEATS == 0)
            beats += 1
            await asyncio.sleep(_BEAT_S)

    def note(self, *, alive: bool, reason: str = "") -> None:
        """What a caller found out by itself."""
        if alive != self.alive:
            if alive:
                _log.info("the shared state answers")
            else:
                _log.warning("the shared state does not answer: %s", reason)
        self.alive = alive

    def require(self) -> None:
        """Raise Unavailable while no request could be billed: such a request is not begun."""
        if not self.alive:
            raise Unavailable(
                "the registry does not answer, so nothing can be billed",
                code="state_unavailable",
                retry_after_s=1,
            )
