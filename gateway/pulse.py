"""Whether the shared state answers, and the price table: kept fresh beside the requests' path."""

import asyncio
import logging
from collections.abc import Sequence

from gateway.errors import Unavailable
from registry.errors import StateUnavailable
from registry.state import State
from registry.usage import Rate

_log = logging.getLogger("hypercast.gateway")

_BEAT_S = 1.0
_RATES_BEATS = 5


class Pulse:
    """`alive` as of the last beat or ledger write; `rates` as of the last few seconds."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.alive = False
        self.rates: Sequence[Rate] = ()

    def __repr__(self) -> str:
        return f"<Pulse {'alive' if self.alive else 'silent'} rates={len(self.rates)}>"

    async def beat(self, *, rates: bool) -> None:
        """Ask once."""
        try:
            await self._state.ping()
            if rates:
                self.rates = await self._state.rates()
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
                "the registry does not answer, so nothing can be billed", code="state_unavailable"
            )
