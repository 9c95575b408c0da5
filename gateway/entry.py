"""A request's record on its way to the ledger: written once, however often that is tried."""

import dataclasses
import logging
import secrets
from collections.abc import Sequence

from gateway.contract import CallUse
from registry.errors import RegistryError, StateUnavailable
from registry.gpu_shares import request_ids
from registry.state import Ledger
from registry.usage import RequestRecord, RequestStatus, voided

_log = logging.getLogger("hypercast.gateway")


def _other_id(record: RequestRecord) -> str:
    """An id for a request whose own is taken; who knows one of its calls finds the record by it."""
    own = request_ids(record.gpu[0].call_id)[1] if record.gpu else ""
    return own if own.startswith(f"{record.request_id}~") else f"{record.request_id}~{secrets.token_hex(4)}"


class Entry:
    """`record`, and the uses of its calls that are settled once it is written."""

    def __init__(self, record: RequestRecord, uses: Sequence[CallUse]) -> None:
        self.record = record
        self.uses = tuple(uses)
        self.is_refused = False
        self._other_id = ""
        self._withdrawn: RequestRecord | None = None  # what earlier writes may have brought to the ledger

    def __repr__(self) -> str:
        return f"<Entry {self.record.request_id} {self.record.status}>"

    async def write(self, ledger: Ledger) -> None:
        """Raises StateUnavailable, or what else was wrong; then it may be called again."""
        if await ledger.add_request(self.record) or await self._is_there(ledger, self.record.request_id):
            return
        # The client used its request id before: this is another request, which gets an id of its own.
        self._other_id = self._other_id or _other_id(self.record)
        record = dataclasses.replace(self.record, request_id=self._other_id)
        if not await ledger.add_request(record) and not await self._is_there(ledger, self._other_id):
            # So has another of its requests used that id, drawn by chance.
            taken, self._other_id = self._other_id, f"{self.record.request_id}~{secrets.token_hex(8)}"
            raise StateUnavailable(f"another request has the id {taken}")

    def refused(self, error: Exception) -> None:
        """The ledger is there, and does not take it: said once, however often that is tried."""
        if not self.is_refused:
            _log.error("the record of request %s is refused", self.record.request_id, exc_info=error)
        self.is_refused = True

    def unacknowledged(self) -> None:
        """The client was told that its request failed: it costs nothing."""
        if self.record.status is RequestStatus.OK:
            self._withdrawn, self.record = self.record, voided(self.record)

    async def _is_there(self, ledger: Ledger, request_id: str) -> bool:
        """Whether what is under that id is this request's, as it is to be.

        It may have been written just now, by a try whose answer was lost. That may be hidden from here:
        the client of the ledger tries again itself, and Redis carries out late what it was sent.
        """
        if self._withdrawn is not None:
            withdrawn = dataclasses.replace(self._withdrawn, request_id=request_id)
            if await ledger.void_request(withdrawn):
                return True
        try:
            there = await ledger.request(request_id)
        except StateUnavailable:
            raise
        except RegistryError:  # there is none, or one that does not decode: another's in any case
            return False
        return there == dataclasses.replace(self.record, request_id=request_id)
