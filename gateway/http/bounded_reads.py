"""Reads of many records: one at a time, few of a tenant's wait, and none outlives its client."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from gateway.disconnect import Attended
from gateway.errors import Unavailable

_MOST_WAITING = 4  # of a tenant, beside the one that reads


class Readings:
    """Gives turns: a read takes seconds of processor time where the ledger is large."""

    def __init__(self, most_waiting: int = _MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._reading = asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Readings reading={self._reading.locked()} waiting={dict(self._waiting)}>"

    @asynccontextmanager
    async def turn(self, tenant: str, receive: Receive) -> AsyncIterator[None]:
        """The body is cancelled when the client leaves. Raises ClientGone; Unavailable where too many of the
        tenant's wait."""
        async with Attended(receive):
            await self._wait(tenant)
            try:
                yield
            finally:
                self._reading.release()

    async def _wait(self, tenant: str) -> None:
        if self._waiting[tenant] >= self._most_waiting:
            raise Unavailable(f"{self._most_waiting} of your reports wait already")
        self._waiting[tenant] += 1
        try:
            await self._reading.acquire()
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
