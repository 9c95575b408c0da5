"""/v1/files: files that callers store, and those that batches write."""

import secrets
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import ApiError, BadRequest, TooMany
from gateway.core.request_context import request_context
from gateway.core.settings import JobSettings
from gateway.http.limits import content_length, too_large
from gateway.http.multipart import UploadForm
from gateway.http.sse import ByteStream
from gateway.jobs.file_store import read_parts, store_file
from gateway.requests.services import Services
from gateway.schemas.jobs import FileDeleted, FileList, FileObject
from gateway.schemas.operations import BYTES
from gateway.schemas.parameters import AFTER, FILE_LIMIT, ORDER, PURPOSE
from registry.errors import NotFound
from registry.records.batch import FilePurpose, FileRecord
from registry.records.job import Submission

_FORM_BYTES = 64 << 10  # of a form beside its file
_PURPOSES = (FilePurpose.BATCH, FilePurpose.USER_DATA)
_MAX_NAME = 256

T = TypeVar("T")


class FileRoutes:
    """The handlers of files. A tenant sees its own."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @property
    def _settings(self) -> JobSettings:
        return self._services.settings.jobs

    async def upload(self, request: Request) -> FileObject:
        """Store the file of a form."""
        settings, state = self._settings, self._services.state
        tenant = request_context(request.scope).caller.tenant
        most = settings.upload_bytes + _FORM_BYTES
        if (announced := content_length(request.scope)) is not None and announced > most:
            raise too_large(settings.upload_bytes)
        known = await state.files(tenant)
        if len(known) >= settings.files / 2 or sum(file.size for file in known) >= settings.file_bytes / 2:
            raise _full(Submission.TENANT_FULL)
        form = UploadForm(request.scope, limit_bytes=most, idle_s=self._services.settings.limits.body_idle_s)
        parts = await store_file(self._services.blobs, form.chunks(request.receive))
        purpose = _purpose(form.fields.get("purpose"))
        now = self._services.clock.wall_s()
        record = FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            tenant=tenant,
            name=(form.filename or "file")[:_MAX_NAME],
            purpose=purpose,
            created_at=now,
            expires_at=now + settings.files_keep_s,
            parts=parts,
        )
        if record.size > settings.upload_bytes:
            raise too_large(settings.upload_bytes)
        submission = await state.put_file(record, files=settings.files, file_bytes=settings.file_bytes)
        if submission in (Submission.FULL, Submission.TENANT_FULL):
            raise _full(submission)
        return file_object(record)

    async def list_files(self, request: Request) -> FileList:
        """Return the files of the tenant."""
        tenant = request_context(request.scope).caller.tenant
        purpose, after, limit = PURPOSE.read(request), AFTER.read(request), FILE_LIMIT.read(request)
        found = [
            file
            for file in await self._services.state.files(tenant)
            if purpose is None or file.purpose.value == purpose
        ]
        if ORDER.read(request) == "asc":
            found.reverse()
        page, more = page_of([(file.id, file) for file in found], after, limit)
        data = [file_object(file) for file in page]
        return FileList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=more,
        )

    async def get(self, request: Request) -> FileObject:
        """Return a file's description."""
        return file_object(await own_file(request, self._services))

    async def content(self, request: Request) -> ASGIApp:
        """Return a file's bytes."""
        return _FileReply(self._services, await own_file(request, self._services))

    async def delete(self, request: Request) -> FileDeleted:
        """Delete a file."""
        file = await own_file(request, self._services)
        await self._services.state.delete_file(file.id)
        return FileDeleted(id=file.id)


class _FileReply:
    def __init__(self, services: Services, file: FileRecord) -> None:
        self._services = services
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = ByteStream(send, self._services.settings.streams.write_timeout_s, BYTES)
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in self._file.name if c.isascii())
        disposition = f'attachment; filename="{name or "file"}"'.encode()
        await stream.start([(b"content-disposition", disposition)])
        async with aclosing(read_parts(self._services.blobs, self._file.parts)) as parts:  # type: ignore[type-var]
            async for data in parts:
                await stream.write(data)
        await stream.end()


async def own_file(request: Request, services: Services, file_id: str | None = None) -> FileRecord:
    """Return a file of the caller's tenant, by default that of the path. Raises ApiError (404)."""
    wanted: str = file_id or request.path_params["file"]
    try:
        file = await services.state.file(wanted)
    except NotFound:
        file = None
    if file is None or file.tenant != request_context(request.scope).caller.tenant:
        raise ApiError(404, "not_found", f"there is no file {wanted!r}", param="file")
    return file


def file_object(file: FileRecord) -> FileObject:
    """Return what the client sees of a file."""
    return FileObject(
        id=file.id,
        bytes=file.size,
        created_at=int(file.created_at),
        expires_at=int(file.expires_at),
        filename=file.name,
        purpose=file.purpose,
    )


def page_of(entries: list[tuple[str, T]], after: str | None, limit: int) -> tuple[list[T], bool]:
    """Return the entries that follow the one named `after`, and whether there are more. Raises BadRequest."""
    first = 0
    if after is not None:
        names = [name for name, _ in entries]
        if after not in names:
            raise BadRequest(f"there is no entry {after!r}", param="after")
        first = names.index(after) + 1
    return [entry for _, entry in entries[first : first + limit]], first + limit < len(entries)


def _purpose(given: str | None) -> FilePurpose:
    if given not in [purpose.value for purpose in _PURPOSES]:
        known = ", ".join(_PURPOSES)
        raise BadRequest(f"'purpose' must be one of {known}", param="purpose")
    return FilePurpose(given)


def _full(submission: Submission) -> TooMany:
    whose = "this tenant" if submission is Submission.TENANT_FULL else "all tenants"
    message = f"there are too many files of {whose}, or too large ones: delete some"
    return TooMany(message, code="files_full", retry_after_s=None)
