"""/admin/usage/archive and /admin/usage/delete: closed days out of Redis, and deletion by tenant."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.api.admin_cluster import LineReply
from gateway.api.bodies import read_json
from gateway.core.errors import Unavailable
from gateway.core.request_context import request_context
from gateway.requests.services import Services
from gateway.schemas.admin import ArchiveUsage, DeleteUsage
from gateway.schemas.answers import ArchivedFile, ArchiveList
from registry.accounting.usage_chunks import day_text
from registry.archive.archive import LedgerArchive
from registry.records.archive import ArchiveFile


class ArchiveRoutes:
    """The handlers of the ledger's archive."""

    def __init__(self, services: Services, archive: LedgerArchive | None) -> None:
        self._services = services
        self._opened = archive
        self._archive_body = msgspec.json.Decoder(ArchiveUsage)
        self._delete_body = msgspec.json.Decoder(DeleteUsage)

    @property
    def _archive(self) -> LedgerArchive:
        if self._opened is None:
            raise Unavailable("this gateway has no archive of the ledger")
        return self._opened

    async def files(self, request: Request) -> ArchiveList:
        """List the files of the archive, by day."""
        index = await self._archive.ledger.index()
        return ArchiveList(files=[_shown(file) for file in index.files])

    async def archive(self, request: Request) -> ASGIApp:
        """Archive closed days; progress is one JSON object a line, the last `{"done": true}`."""
        payload = await read_json(request, self._services, self._archive_body, absent=b"{}")
        steps = self._archive.archiver.archive(payload.before)

        async def lines() -> AsyncGenerator[bytes, None]:
            moved = 0
            async with aclosing(steps):
                async for step in steps:
                    moved = step.moved
                    yield _line(moved=moved, total=step.total, kind=step.kind.value, day=day_text(step.day))
                    if step.file is not None:
                        yield _line(file=_shown(step.file))
            yield _line(done=True, moved=moved)

        return self._reply(request, lines())

    async def delete(self, request: Request) -> ASGIApp:
        """Replace a tenant by an alias in all records; progress as that of archiving."""
        payload = await read_json(request, self._services, self._delete_body)
        steps = self._archive.eraser.erase(payload.tenant)

        async def lines() -> AsyncGenerator[bytes, None]:
            changed, alias = 0, ""
            async with aclosing(steps):
                async for step in steps:
                    changed, alias = changed + step.requests, step.alias
                    yield _line(changed=changed, alias=alias)
            yield _line(done=True, changed=changed, alias=alias)

        return self._reply(request, lines())

    def _reply(self, request: Request, lines: AsyncGenerator[bytes, None]) -> ASGIApp:
        return LineReply(self._services, request_context(request.scope), "application/x-ndjson", lines)


def _line(**fields: Any) -> bytes:
    return msgspec.json.encode(fields) + b"\n"


def _shown(file: ArchiveFile) -> ArchivedFile:
    return ArchivedFile(
        day=day_text(file.day), kind=file.kind, rows=file.rows, bytes=file.nbytes, digest=file.digest
    )
