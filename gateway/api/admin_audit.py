"""/admin/audit: the audit log."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request

from gateway.requests.services import Services
from gateway.schemas.answers import AuditAnswer, AuditView, view
from gateway.schemas.parameters import AUDIT_LOG, CURSOR, LIMIT, OF_KEY, OF_OPERATION, SINCE, UNTIL
from registry.records.audit import AuditLogName, AuditQuery, AuditRecord

_MAX_PAGES = 50  # read for one answer, which may then hold fewer entries than there are


class AuditRoutes:
    """The handlers of the audit log."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def entries(self, request: Request) -> msgspec.Struct:
        """List changes, the latest first; `next` is "" once there are no more."""
        query = AuditQuery(
            log=AuditLogName(AUDIT_LOG.read(request) or AuditLogName.CHANGES),
            since=SINCE.read(request),
            until=UNTIL.read(request),
            cursor=CURSOR.read(request) or "",
            limit=LIMIT.read(request),
        )
        key, operation = OF_KEY.read(request), OF_OPERATION.read(request)
        found: list[AuditRecord] = []
        rest = query
        for _ in range(_MAX_PAGES):
            page = await self._services.state.audit_page(rest)
            found += [one for one in page.records if _is_wanted(one, key, operation)]
            rest = replace(query, cursor=page.cursor, limit=query.limit - len(found))
            if not rest.cursor or not rest.limit:
                break
        answer: msgspec.Struct = AuditAnswer(entries=_shown(found), next=rest.cursor)
        return answer


def _is_wanted(record: AuditRecord, key: str | None, operation: str | None) -> bool:
    entry = record.entry
    named = operation is None or entry.operation == operation
    group = operation is not None and operation.endswith(".") and entry.operation.startswith(operation)
    return (key is None or entry.key_id == key) and (named or group)


def _shown(records: Sequence[AuditRecord]) -> list[msgspec.Struct]:
    return [
        view(
            AuditView,
            one.entry,
            status=one.outcome and one.outcome.status,
            code=one.outcome.code if one.outcome else "",
            made=one.outcome.made if one.outcome else "",
            ended_at=one.outcome and one.outcome.at,
        )
        for one in records
    ]
