"""The right to write the archive: one lease for the cluster, fenced by its epoch in each change."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from rdmacast.aio.groups import cancel_and_discard
from registry.clock import Clock
from registry.errors import Conflict, RegistryError, StaleEpoch
from registry.records.fence import Fence
from registry.redis.state import RedisState

LEASE = "ledger-archive"
TTL_S = 60.0


@dataclass(slots=True)
class ArchiveLease:
    """The lease of one writer."""

    _state: RedisState
    _clock: Clock
    _holder: str
    _fence: Fence
    _renewed_s: float

    @property
    def epoch(self) -> int:
        """The number that fences each change within Redis."""
        return self._fence.epoch

    async def renew(self) -> None:
        """Renew the lease where that is due. Raises StaleEpoch."""
        now = self._clock.monotonic_s()
        if now - self._renewed_s < TTL_S / 6:
            return
        if await self._state.acquire_lease(LEASE, self._holder, TTL_S) != self._fence:
            raise StaleEpoch("another process writes the archive now")
        self._renewed_s = now


async def _keep(lease: ArchiveLease) -> None:
    """Renew the lease during steps that take long; an error shows at the next step."""
    while True:
        await asyncio.sleep(TTL_S / 6)
        with suppress(RegistryError):
            await lease.renew()


@asynccontextmanager
async def archive_lease(state: RedisState, clock: Clock) -> AsyncIterator[ArchiveLease]:
    """Hold the lease. Raises Conflict where another process holds it."""
    holder, now = f"archive-{secrets.token_hex(8)}", clock.monotonic_s()
    fence = await state.acquire_lease(LEASE, holder, TTL_S)
    if fence is None:
        raise Conflict("the ledger's archive is being written: retry when that is done")
    lease = ArchiveLease(state, clock, holder, fence, now)
    renewing = asyncio.create_task(_keep(lease), name="archive lease")
    try:
        yield lease
    finally:
        await cancel_and_discard(renewing)
        await state.release_lease(LEASE, holder)
