"""The concurrency leases of this gateway's requests under keys with limits: renewed, then released.

The leases of a gateway that dies expire.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from registry.clock import Clock
from registry.errors import StateUnavailable
from registry.records.quota import ConcurrencyLease
from registry.state import QuotaState

_log = logging.getLogger("hypercast.gateway")

LEASE_TTL_S = 15.0
_RENEW_PERIOD_S = 5.0
_RETRY_S = 0.5
_RELEASE_TIMEOUT_S = 1.0


class ConcurrencyLeases:
    """The leases held now. Only `run` writes, so that a renewal never overtakes a release."""

    def __init__(self, state: QuotaState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._held: set[ConcurrencyLease] = set()
        self._releasing: dict[ConcurrencyLease, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._renew_at_s = clock.monotonic_s() + _RENEW_PERIOD_S

    def __repr__(self) -> str:
        return f"<ConcurrencyLeases {len(self._held)} held, {len(self._releasing)} releasing>"

    def add(self, lease: ConcurrencyLease) -> None:
        """Hold a lease that Redis granted."""
        self._held.add(lease)

    def release(self, lease: ConcurrencyLease) -> None:
        """Release the lease soon. Idempotent."""
        if lease in self._held:
            self._held.discard(lease)
            self._releasing[lease] = asyncio.Event()
            self._wake.set()

    async def wait_released(self, lease: ConcurrencyLease) -> None:
        """Wait until the lease is released in Redis, for at most a second."""
        if (released := self._releasing.get(lease)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await released.wait()

    async def run(self) -> None:
        """Renew and release until cancelled."""
        available = True
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._renew_at_s - self._clock.monotonic_s())):
                    await self._wake.wait()
            try:
                await self._step()
            except StateUnavailable as error:
                if available:
                    _log.warning("concurrency leases are not renewed: %s", error)
                available = False
                await asyncio.sleep(_RETRY_S)
            else:
                available = True

    async def _step(self) -> None:
        self._wake.clear()
        try:
            if releasing := tuple(self._releasing):
                await self._state.release_concurrency_leases(releasing)
                self._on_released(releasing)
            if self._clock.monotonic_s() >= self._renew_at_s:
                if self._held:
                    await self._state.renew_concurrency_leases(tuple(self._held), ttl_s=LEASE_TTL_S)
                self._renew_at_s = self._clock.monotonic_s() + _RENEW_PERIOD_S
        except StateUnavailable:
            self._wake.set()
            raise

    async def aclose(self) -> None:
        """Release all leases, once `run` has ended; those that cannot be released expire."""
        releasing = (*self._releasing, *self._held)
        self._held.clear()
        if releasing:
            with contextlib.suppress(StateUnavailable):
                await self._state.release_concurrency_leases(releasing)
            self._on_released(releasing)

    def _on_released(self, leases: Iterable[ConcurrencyLease]) -> None:
        for lease in leases:
            if (released := self._releasing.pop(lease, None)) is not None:
                released.set()
