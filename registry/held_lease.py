"""A lease for work that may outlast its time to live: renewed while the work goes on."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rdmacast.aio.groups import cancel_and_discard
from rdmacast.aio.shielded import run_shielded
from registry.clock import Clock
from registry.errors import Conflict, RegistryError, StaleEpoch
from registry.records.fence import Fence
from registry.state import ClusterState


class HeldLease:
    """A lease that one holder renews; once lost it stays lost."""

    def __init__(self, state: ClusterState, clock: Clock, name: str, holder: str, ttl_s: float) -> None:
        self._state = state
        self._clock = clock
        self._name = name
        self._holder = holder
        self._ttl_s = ttl_s
        self._fence: Fence | None = None
        self._renewed_s = float("-inf")
        self._bound: asyncio.Timeout | None = None

    def __repr__(self) -> str:
        return f"<HeldLease {self._name} {self._fence or 'lost'}>"

    @property
    def epoch(self) -> int:
        """The number that fences each change within Redis. Raises StaleEpoch."""
        return self._held().epoch

    async def acquire(self) -> bool:
        """Acquire it; return whether that succeeded."""
        now_s = self._clock.monotonic_s()
        self._fence = await self._state.acquire_lease(self._name, self._holder, self._ttl_s)
        self._renewed_s = now_s
        return self._fence is not None

    async def renew(self) -> None:
        """Renew it where that is due: call it before each step that needs it. Raises StaleEpoch."""
        fence, now_s = self._held(), self._clock.monotonic_s()
        if now_s - self._renewed_s < self._ttl_s / 6:
            return
        if await self._state.acquire_lease(self._name, self._holder, self._ttl_s) != fence:
            self._fence = None
        self._held()
        self._renewed_s = now_s

    @asynccontextmanager
    async def bounding(self) -> AsyncIterator[None]:
        """Cancel what is done within once the lease is lost; this raises StaleEpoch then."""
        try:
            async with asyncio.timeout(None) as self._bound:
                yield
        except TimeoutError:
            if self._bound is not None and self._bound.expired():
                raise self._lost() from None
            raise

    async def keep(self) -> None:
        """Renew it until it is lost: to another holder, or since the state was away for its time to live."""
        while self._fence is not None:
            await asyncio.sleep(self._ttl_s / 6)
            with suppress(RegistryError):
                await self.renew()
            if self._clock.monotonic_s() - self._renewed_s >= self._ttl_s:
                self._fence = None
        if self._bound is not None:
            self._bound.reschedule(asyncio.get_running_loop().time())

    async def release(self) -> None:
        """Release it; where the state is away it expires."""
        with suppress(RegistryError):
            await self._state.release_lease(self._name, self._holder)

    def _held(self) -> Fence:
        if self._fence is None:
            raise self._lost()
        return self._fence

    def _lost(self) -> StaleEpoch:
        return StaleEpoch(f"the lease {self._name!r} was lost: another process may hold it")


@asynccontextmanager
async def hold_lease(
    state: ClusterState, clock: Clock, name: str, *, ttl_s: float, taken: str
) -> AsyncIterator[HeldLease]:
    """Hold the lease. Raises Conflict with the message `taken` where another process holds it."""
    lease = HeldLease(state, clock, name, f"{name}-{secrets.token_hex(8)}", ttl_s)
    try:  # an acquire without a reply may have succeeded
        if not await lease.acquire():
            raise Conflict(taken)
        keeping = asyncio.create_task(lease.keep(), name=f"lease {name}")
        try:
            yield lease
        finally:
            await cancel_and_discard(keeping)
    finally:
        await run_shielded(lease.release())
