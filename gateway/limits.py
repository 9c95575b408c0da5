"""Bounds on what a request may bring: bytes of its body, nesting of its JSON."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.types import Message, Receive, Scope

from gateway.errors import ApiError, BadRequest, from_validation
from gateway.settings import RequestLimits

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection."""


def content_length(scope: Scope) -> int | None:
    """The announced length of the body, None without one. Raises ApiError for nonsense."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit():
                raise BadRequest("bad content-length")
            return int(value)
    return None


def too_large(limit_bytes: int) -> ApiError:
    # The connection stays open: the server throws the rest of the body away. Closing it now would
    # reset it under a client that still sends, which then never sees this answer.
    return ApiError(413, "too_large", f"the body is larger than {limit_bytes} bytes")


async def next_chunk(receive: Receive, idle_s: float) -> Message:
    """The next part of a body. Raises ApiError (408) if none comes."""
    try:
        async with asyncio.timeout(idle_s):
            return await receive()
    except TimeoutError:
        raise _too_slow(f"nothing of the body came for {idle_s:g} s") from None


def _too_slow(message: str) -> ApiError:
    # What may still come of this body must not be taken for the next request.
    return ApiError(408, "body_timeout", message, headers=(("connection", "close"),))


async def read_body(
    scope: Scope, receive: Receive, limits: RequestLimits, *, limit_bytes: int | None = None
) -> bytes:
    """The whole body. Raises ApiError (413 over the limit, 408 if it takes too long), ClientGone."""
    limit_bytes = limits.body_bytes if limit_bytes is None else min(limit_bytes, limits.body_bytes)
    announced = content_length(scope)
    if announced is not None and announced > limit_bytes:
        raise too_large(limit_bytes)
    try:
        async with asyncio.timeout(limits.body_total_s):
            return await _read(receive, limit_bytes, limits.body_idle_s)
    except TimeoutError:
        raise _too_slow(f"the body took more than {limits.body_total_s:g} s") from None


async def _read(receive: Receive, limit_bytes: int, idle_s: float) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await next_chunk(receive, idle_s)
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            raise too_large(limit_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def check_depth(body: bytes, limit: int) -> None:
    """Raise ApiError if the JSON nests deeper than `limit`."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return  # too few brackets to be too deep: no need to look closer
    depth = 0
    for match in _BRACKETS.finditer(body):
        token = match.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > limit:
                raise BadRequest(f"the JSON nests deeper than {limit} levels", code="json_too_deep")
        elif token in (b"]", b"}"):
            depth -= 1


def decode(body: bytes, decoder: msgspec.json.Decoder[T], depth_limit: int) -> T:
    """The body as `T`. Raises ApiError: 400 for bad JSON, 422 for a wrong shape."""
    check_depth(body, depth_limit)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
