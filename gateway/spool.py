"""Records that the ledger did not take while their requests lasted: kept in memory and tried on."""

import asyncio
import logging
from collections import deque

from gateway.contract import Settled
from gateway.entry import Entry
from registry.errors import StateUnavailable
from registry.state import Ledger

_log = logging.getLogger("hypercast.gateway")

_MOST = 100_000
_PAUSE_S = 0.5
_LAST_TRY_S = 2.0


class Spool:
    """Bounded: of too many the first goes. None of these requests was acknowledged, and their calls are
    not settled: of one that is lost with the gateway, or not written within 15 minutes, the nodes write what
    it used (`LostCall`). One that is not taken goes behind the others, so that it keeps none of them."""

    def __init__(self, ledger: Ledger, settled: Settled, *, most: int = _MOST) -> None:
        self._ledger = ledger
        self._settled = settled
        self._most = most
        self._entries: deque[Entry] = deque()
        self._some = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Spool {len(self._entries)}>"

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        if len(self._entries) == self._most:
            _log.error("never billed, too many records wait for the ledger: %r", self._entries.popleft())
        self._entries.append(entry)
        self._some.set()

    async def run(self) -> None:
        """Write what comes, until cancelled."""
        while True:
            await self._some.wait()
            if not await self.drain():
                await asyncio.sleep(_PAUSE_S)

    async def drain(self) -> bool:
        """Write all, unless the ledger does not answer; says whether it took them."""
        for _ in range(len(self._entries)):
            entry = self._entries.popleft()
            try:
                await entry.write(self._ledger)
            except StateUnavailable:  # perhaps for just this record: the next round begins with another
                self._entries.append(entry)
                return False
            except asyncio.CancelledError:
                self._entries.appendleft(entry)
                raise
            except Exception as error:  # whatever it is, the record is kept
                entry.refused(error)
                self._entries.append(entry)
                continue
            _log.info("billed late: %s", entry.record.request_id)
            self._settled(entry.uses)
        if self._entries:
            return False
        self._some.clear()
        return True

    async def aclose(self) -> None:
        """Try each once more."""
        try:
            async with asyncio.timeout(_LAST_TRY_S):
                for _ in range(len(self._entries)):
                    if await self.drain():
                        break
        except TimeoutError:
            pass  # told below
        for entry in self._entries:
            _log.error("never billed, the ledger does not take it: %r", entry.record)
