"""The audit log in one process, as in `registry.redis.audit`."""

from registry.errors import InvalidRecord
from registry.keys import AUDIT_LENGTH
from registry.records.audit import AuditEntry, AuditLogName, AuditOutcome, AuditPage, AuditRecord
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

    async def audit_page(
        self,
        *,
        log: AuditLogName = AuditLogName.CHANGES,
        since: float | None = None,
        until: float | None = None,
        cursor: str = "",
        limit: int = 100,
    ) -> AuditPage:
        ids = list(self._records[log])
        if cursor and cursor not in ids:
            raise InvalidRecord(f"unknown cursor {cursor!r}")
        earlier = ids[: ids.index(cursor)] if cursor else ids
        found = [self._records[log][one] for one in reversed(earlier)]
        found = [
            one
            for one in found
            if (since is None or one.entry.at >= since) and (until is None or one.entry.at < until)
        ]
        cursor = found[limit - 1].entry.id if len(found) >= limit else ""
        return AuditPage(records=found[:limit], cursor=cursor)
