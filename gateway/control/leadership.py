"""The controller lease: one gateway acts on the cluster, fenced against earlier holders."""

import asyncio
import logging
from collections.abc import Callable

from gateway.cluster.condition import ChangeCondition
from registry.clock import Clock
from registry.errors import RegistryError
from registry.records.fence import NO_FENCE, Fence
from registry.state import ClusterState

log = logging.getLogger(__name__)

LEASE = "controller"

# After the death of a gateway another one leads within TTL_S plus one renewal interval. A busy gateway may
# miss several renewals in a row.
TTL_S = 2.5
_RENEWALS = 5  # per time to live


class Leadership:
    """The holder of the controller lease; `fence` is set while this gateway holds it, else None.

    The lease counts as lost when it was not renewed in time by this gateway's own clock, so that two gateways
    never both act as the controller. It also does while nodes report a greater fence (`seen`): either another
    gateway holds the lease, or Redis has lost its state, and the next renewal gets a greater one.
    """

    def __init__(
        self,
        state: ClusterState,
        holder: str,
        changes: ChangeCondition,
        clock: Clock,
        *,
        seen: Callable[[], Fence] = lambda: NO_FENCE,
        ttl_s: float = TTL_S,
    ) -> None:
        self._state = state
        self._holder = holder
        self._changes = changes
        self._clock = clock
        self._ttl_s = ttl_s
        self._seen = seen
        self._fence: Fence | None = None
        self._greatest = NO_FENCE
        self._until = 0.0

    def __repr__(self) -> str:
        return f"<Leadership {self._holder} {self.fence}>"

    @property
    def fence(self) -> Fence | None:
        held = self._clock.monotonic_s() < self._until
        return self._fence if held and self._fence is not None and self._fence >= self._seen() else None

    @property
    def epoch(self) -> int | None:
        fence = self.fence
        return None if fence is None else fence.epoch

    async def run(self) -> None:
        """Acquire the lease when it is free and renew it, until cancelled; then release it."""
        try:
            while True:
                await self._renew()
                await asyncio.sleep(self._ttl_s / _RENEWALS)
        finally:
            await asyncio.shield(self._release())

    async def _renew(self) -> None:
        before, requested_at = self.fence, self._clock.monotonic_s()
        beyond = max(self._greatest, self._seen())
        try:
            self._fence = await self._state.acquire_lease(LEASE, self._holder, self._ttl_s, beyond=beyond)
            self._until = requested_at + self._ttl_s
            self._greatest = self._fence or self._greatest
        except RegistryError as error:
            log.warning("controller lease: not renewed: %s", error)
        if self.fence != before:
            log.info("gateway %s: controller %s -> %s", self._holder, before, self.fence)
            self._changes.notify_soon()

    async def _release(self) -> None:
        if self.fence is None:
            return
        self._fence = None
        try:
            await self._state.release_lease(LEASE, self._holder)
        except RegistryError as error:
            log.info("controller lease: not released, it will expire: %s", error)
