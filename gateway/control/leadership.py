"""The controller lease: one gateway acts on the cluster, fenced by an epoch."""

import asyncio
import logging

from gateway.cluster.condition import ChangeCondition
from registry.clock import Clock
from registry.errors import RegistryError
from registry.state import ClusterState

log = logging.getLogger(__name__)

LEASE = "controller"

# After the death of a gateway another one leads within TTL_S plus one renewal interval. A busy gateway may
# miss several renewals in a row.
TTL_S = 2.5
_RENEWALS = 5  # per time to live


class Leadership:
    """The holder of the controller lease; `epoch` is set while this gateway holds it, else None.

    The lease counts as lost when it was not renewed in time by this gateway's own clock, so that two gateways
    never both act as the controller.
    """

    def __init__(
        self,
        state: ClusterState,
        holder: str,
        changes: ChangeCondition,
        clock: Clock,
        *,
        ttl_s: float = TTL_S,
    ) -> None:
        self._state = state
        self._holder = holder
        self._changes = changes
        self._clock = clock
        self._ttl_s = ttl_s
        self._epoch: int | None = None
        self._until = 0.0

    def __repr__(self) -> str:
        return f"<Leadership {self._holder} epoch={self.epoch}>"

    @property
    def epoch(self) -> int | None:
        return self._epoch if self._clock.monotonic_s() < self._until else None

    async def run(self) -> None:
        """Acquire the lease when it is free and renew it, until cancelled; then release it."""
        try:
            while True:
                await self._renew()
                await asyncio.sleep(self._ttl_s / _RENEWALS)
        finally:
            await asyncio.shield(self._release())

    async def _renew(self) -> None:
        before, requested_at = self.epoch, self._clock.monotonic_s()
        try:
            self._epoch = await self._state.acquire_lease(LEASE, self._holder, self._ttl_s)
            self._until = requested_at + self._ttl_s
        except RegistryError as error:
            log.warning("controller lease: not renewed: %s", error)
        if self.epoch != before:
            log.info("gateway %s: controller epoch %s -> %s", self._holder, before, self.epoch)
            self._changes.notify_soon()

    async def _release(self) -> None:
        if self.epoch is None:
            return
        self._epoch = None
        try:
            await self._state.release_lease(LEASE, self._holder)
        except RegistryError as error:
            log.info("controller lease: not released, it will expire: %s", error)
