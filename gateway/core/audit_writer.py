"""The writer of one gateway's entries of the audit log: to the shared state, and as JSON Lines."""

import logging

import msgspec

from gateway.core.ids import new_request_id
from registry.clock import Clock
from registry.errors import StateUnavailable
from registry.records.audit import AuditEntry, AuditLogName, AuditOutcome
from registry.state import AuditLog

_log = logging.getLogger("hypercast.gateway")
_lines = logging.getLogger("hypercast.audit")  # to a file, or with the gateway's log

MAX_TARGET = 256


class AuditWriter:
    """The writer of changes before they are made, and of their outcomes."""

    def __init__(self, state: AuditLog, clock: Clock, gateway: str) -> None:
        self._state = state
        self._clock = clock
        self.gateway = gateway

    async def begin(self, entry: AuditEntry) -> None:
        """Record a change that is about to be made. Raises StateUnavailable: it must not be made then."""
        await self._state.add_audit_entry(entry)
        _write("attempt", entry)

    async def begin_own(self, operation: str, target: str = "") -> str:
        """Record a change that this gateway makes by itself; return its id for `end`."""
        at, own_id = self._clock.wall_s(), new_request_id()
        entry = AuditEntry(id=own_id, at=at, gateway=self.gateway, operation=operation, target=target)
        await self.begin(entry)
        return own_id

    async def end(self, entry_id: str, status: int, *, code: str = "", made: str = "") -> None:
        """Record the outcome of a change; a failure is logged alone, for the change was made."""
        outcome = AuditOutcome(at=self._clock.wall_s(), status=status, code=code, made=made)
        _write("outcome", outcome, id=entry_id)
        try:
            await self._state.end_audit_entry(entry_id, outcome)
        except StateUnavailable as error:
            _log.error("the outcome of %s (%d) is not in the audit log: %s", entry_id, status, error)

    async def note_refused(self, entry: AuditEntry, status: int, code: str) -> None:
        """Record a refused change in the log of refusals, if that can be written."""
        outcome = AuditOutcome(at=self._clock.wall_s(), status=status, code=code)
        _write("refused", entry, status=status)
        try:
            await self._state.add_audit_entry(entry, log=AuditLogName.REFUSED)
            await self._state.end_audit_entry(entry.id, outcome, log=AuditLogName.REFUSED)
        except StateUnavailable as error:
            _log.warning("the refusal of %s is not in the audit log: %s", entry.id, error)


def _write(event: str, record: AuditEntry | AuditOutcome, **more: str | int) -> None:
    line = {"event": event, **more, **msgspec.to_builtins(record)}
    _lines.info("%s", msgspec.json.encode(line).decode())
