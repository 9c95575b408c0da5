"""The places that this gateway's requests hold under their keys' limits: kept while they run, then given
back.

A gateway that dies stops keeping them, and they lapse.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from registry.clock import Clock
from registry.errors import StateUnavailable
from registry.quota import Place
from registry.state import QuotaState

_log = logging.getLogger("hypercast.gateway")

PLACE_TTL_S = 15.0
_KEEP_EVERY_S = 5.0
_RETRY_S = 0.5
_LEFT_WAIT_S = 1.0


class Places:
    """`run` does all writing, so that keeping a place never overtakes giving it back."""

    def __init__(self, state: QuotaState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._held: set[Place] = set()
        self._leaving: dict[Place, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._keep_at_s = clock.monotonic_s() + _KEEP_EVERY_S

    def __repr__(self) -> str:
        return f"<Places {len(self._held)} held, {len(self._leaving)} leaving>"

    def hold(self, place: Place) -> None:
        """The state has admitted a request to this place."""
        self._held.add(place)

    def leave(self, place: Place) -> None:
        """The place is to be given back, soon. Idempotent."""
        if place in self._held:
            self._held.discard(place)
            self._leaving[place] = asyncio.Event()
            self._wake.set()

    async def left(self, place: Place) -> None:
        """Wait until a place that is leaving was given back; not for long."""
        if (gone := self._leaving.get(place)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEFT_WAIT_S):
                    await gone.wait()

    async def run(self) -> None:
        """Keep and give back until cancelled."""
        answers = True
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._keep_at_s - self._clock.monotonic_s())):
                    await self._wake.wait()
            try:
                await self._turn()
            except StateUnavailable as error:
                if answers:
                    _log.warning("places of limited keys are not kept: %s", error)
                answers = False
                await asyncio.sleep(_RETRY_S)
            else:
                answers = True

    async def _turn(self) -> None:
        self._wake.clear()
        try:
            if leaving := tuple(self._leaving):
                await self._state.release_places(leaving)
                self._given_back(leaving)
            if self._clock.monotonic_s() >= self._keep_at_s:
                if self._held:
                    await self._state.keep_places(tuple(self._held), ttl_s=PLACE_TTL_S)
                self._keep_at_s = self._clock.monotonic_s() + _KEEP_EVERY_S
        except StateUnavailable:
            self._wake.set()
            raise

    async def aclose(self) -> None:
        """Give back what is left, once `run` has ended; what cannot be given back lapses."""
        leaving = (*self._leaving, *self._held)
        self._held.clear()
        if leaving:
            with contextlib.suppress(StateUnavailable):
                await self._state.release_places(leaving)
            self._given_back(leaving)

    def _given_back(self, places: Iterable[Place]) -> None:
        for place in places:
            if (gone := self._leaving.pop(place, None)) is not None:
                gone.set()
