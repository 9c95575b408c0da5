"""Tells the other gateways what this one's calls need: at once when calls begin to wait, else in batches."""

import asyncio
import logging
from collections.abc import Sequence

from gateway.admission import Admission
from registry.change import Demand
from registry.errors import RegistryError
from registry.state import ClusterState

log = logging.getLogger(__name__)


class DemandPublisher:
    """Publishes `Admission`'s lanes through `put_demand`. `changed` is cheap and may be called at will."""

    def __init__(
        self,
        state: ClusterState,
        admission: Admission,
        gateway_id: str,
        *,
        ttl_s: float = 10.0,
        batch_s: float = 0.1,
    ) -> None:
        self._state = state
        self._admission = admission
        self._gateway_id = gateway_id
        self._ttl_s = ttl_s
        self._batch_s = batch_s
        self._published: tuple[Demand, ...] = ()
        self._dirty = asyncio.Event()
        self._urgent = asyncio.Event()

    def demands(self) -> tuple[Demand, ...]:
        """What this gateway needs now."""
        return tuple(
            Demand(
                gateway=self._gateway_id,
                function=lane.key.function,
                version=lane.key.version,
                in_flight=lane.in_flight,
                held=len(lane.held),
            )
            for lane in self._admission.lanes()
        )

    def changed(self, *, urgent: bool = False) -> None:
        """Some count changed; `urgent` when a call waits where none did."""
        self._dirty.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            refresh_s = self._ttl_s / 3 if self._published else None
            try:
                async with asyncio.timeout(refresh_s):
                    await self._dirty.wait()
                async with asyncio.timeout(self._batch_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass  # time to refresh, or the batch is full
            self._dirty.clear()
            self._urgent.clear()
            await self._publish(self.demands())

    async def close(self) -> None:
        """Withdraw all demand."""
        if self._published:
            await self._publish(())

    async def _publish(self, demands: Sequence[Demand]) -> None:
        now = tuple(demands)
        if not now and not self._published:
            return
        try:
            await self._state.put_demand(self._gateway_id, now, self._ttl_s)
        except RegistryError as error:
            # Held calls are what the lease's holder must hear of: say it again once the state is back.
            log.warning("demand of %s not published: %s", self._gateway_id, error)
            await asyncio.sleep(self._batch_s)
            self._dirty.set()
            return
        self._published = now
