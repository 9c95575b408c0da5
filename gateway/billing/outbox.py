"""The outbox: records that the ledger did not accept during their request, retried from memory."""

import asyncio
import logging
from collections import deque

from gateway.billing.outbox_record import OutboxRecord
from gateway.core.contract import OnSettled
from registry.errors import StateUnavailable
from registry.state import Ledger

_log = logging.getLogger("hypercast.gateway")

_MAX_RECORDS = 100_000
_RETRY_S = 0.5
_CLOSE_TIMEOUT_S = 2.0


class Outbox:
    """A bounded queue of records to write; when it is full, the oldest is dropped.

    The clients of these requests got an error, and the calls are not acknowledged: if a record is lost with
    the gateway, or not written within 15 minutes, the nodes write the usage (`LostCall`). A record that
    fails goes to the end of the queue, so that it blocks no other.
    """

    def __init__(self, ledger: Ledger, on_settled: OnSettled, *, max_records: int = _MAX_RECORDS) -> None:
        self._ledger = ledger
        self._on_settled = on_settled
        self._max_records = max_records
        self._records: deque[OutboxRecord] = deque()
        self._any = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Outbox {len(self._records)}>"

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: OutboxRecord) -> None:
        """Queue a record, dropping the oldest where the outbox is full."""
        if len(self._records) == self._max_records:
            _log.error("never billed, the outbox is full: %r", self._records.popleft())
        self._records.append(record)
        self._any.set()

    async def run(self) -> None:
        """Write queued records until cancelled."""
        while True:
            await self._any.wait()
            if not await self.drain():
                await asyncio.sleep(_RETRY_S)

    async def drain(self) -> bool:
        """Try each record once, until Redis fails; return whether all were written."""
        for _ in range(len(self._records)):
            record = self._records.popleft()
            try:
                await record.write(self._ledger)
            except StateUnavailable:  # perhaps for this record only: the next round starts with another
                self._records.append(record)
                return False
            except asyncio.CancelledError:
                self._records.appendleft(record)
                raise
            except Exception as error:  # whatever it is, the record is kept
                record.on_refused(error)
                self._records.append(record)
                continue
            _log.info("request %s: billed late", record.record.request_id)
            self._on_settled(record.uses)
        if self._records:
            return False
        self._any.clear()
        return True

    async def aclose(self) -> None:
        """Try each record once more, and log those that remain."""
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                for _ in range(len(self._records)):
                    if await self.drain():
                        break
        except TimeoutError:
            pass  # logged below
        for record in self._records:
            _log.error("never billed, the ledger does not accept it: %r", record.record)
