"""The controller's lease: which gateway acts on the cluster, fenced by an epoch."""

import asyncio
import logging

from gateway.wakeup import Wakeup
from registry.clock import Clock
from registry.errors import RegistryError
from registry.state import ClusterState

log = logging.getLogger(__name__)

LEASE = "controller"

# When a gateway dies another one leads after at most TTL_S and the pause between two tries. A gateway
# that is merely busy may miss several renewals in a row.
TTL_S = 2.5
_TRIES = 5  # in the time of a lease


class Leadership:
    """`epoch` is this gateway's epoch while it holds the lease, else None.

    The lease is taken as lost when it could not be renewed in time by this gateway's own clock, so
    that two gateways never both believe that they have it.
    """

    def __init__(
        self, state: ClusterState, holder: str, changes: Wakeup, clock: Clock, *, ttl_s: float = TTL_S
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
        """Take the lease whenever it is free and renew it, until cancelled; then give it back."""
        try:
            while True:
                await self._renew()
                await asyncio.sleep(self._ttl_s / _TRIES)
        finally:
            await asyncio.shield(self._release())

    async def _renew(self) -> None:
        before, asked_at = self.epoch, self._clock.monotonic_s()
        try:
            self._epoch = await self._state.acquire_lease(LEASE, self._holder, self._ttl_s)
            self._until = asked_at + self._ttl_s
        except RegistryError as error:
            log.warning("the controller lease was not renewed: %s", error)
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
            log.info("the controller lease was not given back, it will run out: %s", error)
