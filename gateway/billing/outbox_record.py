"""A request's record on its way to the ledger, written exactly once however often it is tried."""

import logging
from collections.abc import Sequence

from gateway.core.contract import CallUsage
from registry.errors import Conflict, NotFound
from registry.records.usage import RequestRecord, RequestStatus, voided
from registry.state import Ledger

_log = logging.getLogger("hypercast.gateway")


class OutboxRecord:
    """`record`, and the uses of its calls, to be acknowledged once it is written."""

    def __init__(self, record: RequestRecord, uses: Sequence[CallUsage]) -> None:
        self.record = record
        self.uses = tuple(uses)
        self.is_refused = False
        self._withdrawn: RequestRecord | None = None  # as earlier tries may have written it

    def __repr__(self) -> str:
        return f"<OutboxRecord {self.record.request_id} {self.record.status}>"

    async def write(self, ledger: Ledger) -> None:
        """Write the record. Raises StateUnavailable, or what the ledger raised; may be called again then."""
        if not await ledger.add_request(self.record) and not await self._is_stored(ledger):
            raise Conflict(f"the ledger has another request {self.record.request_id}")

    def on_refused(self, error: BaseException) -> None:
        """Log, once, that the ledger answers but rejects the record."""
        if not self.is_refused:
            _log.error("request %s: the ledger rejects its record", self.record.request_id, exc_info=error)
        self.is_refused = True

    def void(self) -> None:
        """Make the record free of charge: its client got an error."""
        if self.record.status is RequestStatus.OK:
            self._withdrawn, self.record = self.record, voided(self.record)

    async def _is_stored(self, ledger: Ledger) -> bool:
        """Return whether the ledger's record of this id is this one, in its present state.

        A try whose reply was lost may have written it: Redis executes late what it received, and the
        ledger's client retries by itself.
        """
        if self._withdrawn is not None and await ledger.void_request(self._withdrawn):
            return True
        try:
            return await ledger.request(self.record.request_id) == self.record
        except NotFound:
            return False
