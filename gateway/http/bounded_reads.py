"""Reads of many records: one at a time, a bounded number for each tenant, and none outlives its client."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Scope

from gateway.core.errors import Unavailable
from gateway.http.disconnect import CancelOnDisconnect

_MAX_WAITING = 4  # of a tenant, beside the one that runs
_MAX_STREAMS = 2  # of a tenant
_MAX_ALL_STREAMS = 16


class BoundedReads:
    """A lock for ledger reads, which take seconds of processor time where the ledger is large."""

    def __init__(self, max_waiting: int = _MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._reading = asyncio.Lock()
        self._waiting: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    def __repr__(self) -> str:
        reading, waiting, streams = self._reading.locked(), dict(self._waiting), dict(self._streams)
        return f"<BoundedReads reading={reading} waiting={waiting} streams={streams}>"

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

    @contextmanager
    def stream(self, tenant: str) -> Iterator[asyncio.Lock]:
        """Admit a read that goes on as its client takes it; it holds the lock, which it gets, for each page.

        Raises Unavailable where too many of the tenant, or of all, go on.
        """
        own, total = self._streams[tenant], self._streams.total()
        if own >= _MAX_STREAMS or total >= _MAX_ALL_STREAMS:
            raise Unavailable(f"{total} exports go on, {own} of this tenant: retry later")
        self._streams[tenant] += 1
        try:
            yield self._reading
        finally:
            self._streams[tenant] -= 1
            if not self._streams[tenant]:
                del self._streams[tenant]

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
