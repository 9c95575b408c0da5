"""Blobs over HTTP: resumable uploads into the content-addressed store."""

import re
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from gateway.blob_keeper import BlobKeeper
from gateway.errors import ApiError, Unprocessable
from gateway.limits import decode, next_chunk, read_body, too_large
from gateway.parameters import UPLOAD_LENGTH, UPLOAD_OFFSET
from gateway.responses import encoded
from gateway.schemas_admin import MissingAnswer, MissingBlobs
from gateway.services import Services
from registry.errors import Conflict

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobRoutes:
    """`Upload-Offset` says how many bytes of a blob are there, `Upload-Complete` whether that is all."""

    def __init__(self, services: Services, keeper: BlobKeeper) -> None:
        self._services = services
        self._keeper = keeper
        self._missing = msgspec.json.Decoder(MissingBlobs)

    async def missing(self, request: Request) -> Response:
        """Which of these blobs the store lacks; the others are kept for the deploy that asks."""
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits)
        digests = decode(body, self._missing, limits).digests
        self._keeper.pin(digests)
        blobs = self._services.blobs
        lacking = [digest for digest in digests if await blobs.size(digest) is None]
        for digest in set(digests).difference(lacking):
            await blobs.touch(digest)  # for the sweeps of other gateways, and of this one's next life
        return encoded(MissingAnswer(missing=lacking))

    async def status(self, request: Request) -> Response:
        """How much of a blob there is."""
        digest = _digest(request)
        size = await self._services.blobs.size(digest)
        offset = await self._services.blobs.partial_size(digest) if size is None else size
        answer = {"digest": digest, "offset": offset, "size": size, "complete": size is not None}
        return encoded(answer, headers=_progress(offset, complete=size is not None))

    async def append(self, request: Request) -> Response:
        """Add the body at `Upload-Offset` of `Upload-Length` bytes in all; 409 if that is not where the
        upload stands."""
        digest = _digest(request)
        offset, total = UPLOAD_OFFSET.read(request), UPLOAD_LENGTH.read(request)
        limits = self._services.settings.limits
        if total > limits.upload_bytes:
            raise too_large(limits.upload_bytes)
        self._keeper.hold((digest,))
        blobs = self._services.blobs
        try:
            reached = await blobs.append(
                digest, offset, _chunks(request.receive, limits.body_idle_s), total=total
            )
        except Conflict as error:
            stands = await blobs.partial_size(digest)
            raise ApiError(
                409, "wrong_offset", str(error), headers=(("upload-offset", str(stands)),)
            ) from error
        complete = reached == total
        headers = _progress(reached, complete=complete)
        return encoded({"digest": digest, "offset": reached, "complete": complete}, headers=headers)


async def _chunks(receive: Receive, idle_s: float) -> AsyncIterator[bytes]:
    """The body as it comes. A client that leaves ends it early: what came is kept for the next try."""
    while True:
        message = await next_chunk(receive, idle_s)
        if message["type"] == "http.disconnect":
            return
        if body := message.get("body", b""):
            yield body
        if not message.get("more_body", False):
            return


def _progress(offset: int, *, complete: bool) -> tuple[tuple[str, str], ...]:
    return (("upload-offset", str(offset)), ("upload-complete", "?1" if complete else "?0"))


def _digest(request: Request) -> str:
    digest: str = request.path_params["digest"]
    if not _DIGEST.fullmatch(digest):
        raise Unprocessable("a digest is 64 hex digits", param="digest")
    return digest
