"""Reads of many records: one at a time, a bounded queue for each tenant, and none outlives its client."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from gateway.core.errors import Unavailable
from gateway.http.disconnect import CancelOnDisconnect

_MAX_WAITING = 4  # of a tenant, beside the one that runs


class BoundedReads:
    """A lock for ledger reads, which take seconds of processor time where the ledger is large."""

    def __init__(self, max_waiting: int = _MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._reading = asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Readings reading={self._reading.locked()} waiting={dict(self._waiting)}>"

    @asynccontextmanager
    async def slot(self, tenant: str, scope: Scope) -> AsyncIterator[None]:
        """Hold the lock; the body is cancelled when the client leaves.

        Raises ClientGone, and Unavailable where too many reads of the tenant are queued.
        """
        with CancelOnDisconnect(scope):
            await self._wait(tenant)
            try:
                yield
            finally:
                self._reading.release()

    async def _wait(self, tenant: str) -> None:
        if self._waiting[tenant] >= self._max_waiting:
            raise Unavailable(f"this tenant has {self._max_waiting} usage reports queued: retry later")
        self._waiting[tenant] += 1
        try:
            await self._reading.acquire()
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
