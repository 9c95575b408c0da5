"""The audit log in one process, as in `registry.redis.audit`."""

from registry.errors import InvalidRecord
from registry.keys import AUDIT_LENGTH
from registry.records.audit import (
    CHANGES,
    AuditEntry,
    AuditLogName,
    AuditOutcome,
    AuditPage,
    AuditQuery,
    AuditRecord,
)
from registry.state import AuditLog


class MemoryAudit(AuditLog):
    """The audit log in dictionaries; positions are those of arrival."""

    def __init__(self) -> None:
        self._records: dict[AuditLogName, dict[str, AuditRecord]] = {log: {} for log in AuditLogName}

    async def add_audit_entry(
        self, entry: AuditEntry, *, log: AuditLogName = AuditLogName.CHANGES, length: int = AUDIT_LENGTH
    ) -> None:
        records = self._records[log]
        records.setdefault(entry.id, AuditRecord(entry=entry))
        while len(records) > length:
            del records[next(iter(records))]

    async def end_audit_entry(
        self, entry_id: str, outcome: AuditOutcome, *, log: AuditLogName = AuditLogName.CHANGES
    ) -> None:
        known = self._records[log].get(entry_id)
        if known is not None and known.outcome is None:
            self._records[log][entry_id] = AuditRecord(entry=known.entry, outcome=outcome)

    async def audit_page(self, query: AuditQuery = CHANGES) -> AuditPage:
        records = self._records[query.log]
        ids = list(records)
        if query.cursor and query.cursor not in ids:
            raise InvalidRecord(f"unknown cursor {query.cursor!r}")
        earlier = ids[: ids.index(query.cursor)] if query.cursor else ids
        since, until = query.since, query.until
        found = [
            record
            for record in map(records.__getitem__, reversed(earlier))
            if (since is None or record.entry.at >= since) and (until is None or record.entry.at < until)
        ]
        cursor = found[query.limit - 1].entry.id if len(found) >= query.limit else ""
        return AuditPage(records=found[: query.limit], cursor=cursor)
