"""Resumable uploads into the content-addressed store."""

import re
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from gateway.api.blob_collector import BlobCollector
from gateway.api.bodies import read_json
from gateway.core.errors import ApiError, Unprocessable
from gateway.http.limits import next_chunk, too_large
from gateway.http.responses import json_response
from gateway.requests.services import Services
from gateway.schemas.admin import MissingAnswer, MissingBlobs
from gateway.schemas.answers import BlobProgress, BlobStatus
from gateway.schemas.parameters import UPLOAD_LENGTH, UPLOAD_OFFSET
from registry.errors import Conflict

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobRoutes:
    """The handlers of blobs. `Upload-Offset` is the number of bytes stored, `Upload-Complete` whether all."""

    def __init__(self, services: Services, collector: BlobCollector) -> None:
        self._services = services
        self._collector = collector
        self._missing = msgspec.json.Decoder(MissingBlobs)

    async def missing(self, request: Request) -> MissingAnswer:
        """Return which of the blobs the store lacks; the others are pinned for the deploy."""
        digests = (await read_json(request, self._services, self._missing)).digests
        self._collector.pin(digests)
        blobs = self._services.blobs
        lacking = [digest for digest in digests if await blobs.size(digest) is None]
        self._collector.unpin(lacking)  # an upload pins them: invented digests would fill the memory
        for digest in set(digests).difference(lacking):
            await blobs.touch(digest)  # for sweeps of other gateways, and of this one after a restart
        return MissingAnswer(missing=lacking)

    async def status(self, request: Request) -> Response:
        """Return how much of a blob is stored."""
        digest = _digest(request)
        size = await self._services.blobs.size(digest)
        offset = await self._services.blobs.partial_size(digest) if size is None else size
        answer = BlobStatus(digest=digest, offset=offset, size=size, complete=size is not None)
        return json_response(answer, headers=_progress(offset, complete=size is not None))

    async def append(self, request: Request) -> Response:
        """Append the body at `Upload-Offset` of `Upload-Length` bytes; 409 if that is not the stored size."""
        digest = _digest(request)
        offset, total = UPLOAD_OFFSET.read(request), UPLOAD_LENGTH.read(request)
        limits = self._services.settings.limits
        if total > limits.upload_bytes:
            raise too_large(limits.upload_bytes)
        self._collector.renew_pins((digest,))
        blobs = self._services.blobs
        try:
            reached = await blobs.append(
                digest, offset, _chunks(request.receive, limits.body_idle_s), total=total
            )
        except Conflict as error:
            stored = await blobs.partial_size(digest)
            raise ApiError(
                409, "wrong_offset", str(error), headers=(("upload-offset", str(stored)),)
            ) from error
        complete = reached == total
        headers = _progress(reached, complete=complete)
        return json_response(BlobProgress(digest=digest, offset=reached, complete=complete), headers=headers)


async def _chunks(receive: Receive, idle_s: float) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; a disconnect ends it early, and the part that arrived is kept."""
    while True:
        message = await next_chunk(receive(), idle_s)
        if message["type"] == "http.disconnect":
            return
        if body := message.get("body", b""):
            yield body
        if not message.get("more_body", False):
            return


def _progress(offset: int, *, complete: bool) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"upload-offset", b"%d" % offset), (b"upload-complete", b"?1" if complete else b"?0"))


def _digest(request: Request) -> str:
    digest: str = request.path_params["digest"]
    if not _DIGEST.fullmatch(digest):
        raise Unprocessable("a digest must be 64 lowercase hex digits", param="digest")
    return digest
