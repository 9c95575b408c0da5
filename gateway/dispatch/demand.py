"""Load reports of this gateway: published at once when calls start to wait, otherwise in batches."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.dispatch.admission import Admission
from registry.errors import RegistryError
from registry.records.change import VersionLoad
from registry.state import ClusterState

log = logging.getLogger(__name__)


class DemandPublisher:
    """A publisher of the admission's queue lengths through `put_load_report`. `changed` is cheap."""

    def __init__(
        self,
        state: ClusterState,
        admission: Admission,
        gateway_id: str,
        *,
        ttl_s: float = 10.0,
        batch_s: float = 0.05,
    ) -> None:
        self._state = state
        self._admission = admission
        self._gateway_id = gateway_id
        self._ttl_s = ttl_s
        self._batch_s = batch_s
        self._published: tuple[VersionLoad, ...] = ()
        self._dirty = asyncio.Event()
        self._is_dirty = False  # read without a call, at each change
        self._urgent = asyncio.Event()
        self._failing_since_s: float | None = None
        self._on_failure: Callable[[], None] | None = None
        self.failure = ""  # why the last report was not published

    @property
    def failing_s(self) -> float:
        """For how long no report could be published, 0 if the last one was."""
        if self._failing_since_s is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._failing_since_s

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each report that was not published."""
        self._on_failure = callback

    def changed(self, *, urgent: bool = False) -> None:
        """Mark the counts as changed; `urgent` when a queue was empty before."""
        if not self._is_dirty:
            self._is_dirty = True
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
            self._is_dirty = False
            self._dirty.clear()
            self._urgent.clear()
            await self._publish(self._admission.loads())

    async def close(self) -> None:
        """Withdraw all load reports."""
        if self._published:
            await self._publish(())

    async def _publish(self, demands: Sequence[VersionLoad]) -> None:
        now = tuple(demands)
        if not now and not self._published:
            self._failing_since_s = None
            return
        try:
            await self._state.put_load_report(self._gateway_id, now, self._ttl_s)
        except RegistryError as error:
            # The controller must receive queued calls: publish again once the state is reachable.
            if self._failing_since_s is None:
                self._failing_since_s = asyncio.get_running_loop().time()
                log.warning("load report of %s not published: %s", self._gateway_id, error)
            self.failure = str(error)
            if self._on_failure is not None:
                self._on_failure()
            await asyncio.sleep(self._batch_s)
            self._dirty.set()
            return
        self._published = now
        self._failing_since_s = None
