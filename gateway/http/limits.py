"""Bounds on a request's body: bytes, time, and the size and nesting of its JSON."""

import time
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from starlette.types import Message, Receive, Scope

from gateway.core.errors import ApiError, BadRequest, from_validation
from gateway.core.settings import JsonBounds, RequestLimits
from rdmacast.aio.eager import Ready, run_within

_NOT_STRUCTURE = bytes(sorted(set(range(256)) - set(b'"[]{},')))
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_ANY = msgspec.json.Decoder(msgspec.Raw)
_MAX_ESCAPES = 1 << 23

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection."""


def content_length(scope: Scope) -> int | None:
    """Return the announced length of the body, None without one. Raises BadRequest for a malformed one."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit():
                raise BadRequest("the content-length header is not a number")
            return int(value)
    return None


def too_large(limit_bytes: int) -> ApiError:
    """Return the error (413) for a body over `limit_bytes`."""
    # The connection stays open, and the rest of the body is discarded: closing it now would reset it under
    # a client that still sends, which would never see this response.
    return ApiError(413, "too_large", f"the body is larger than {limit_bytes} bytes")


async def next_chunk(received: Awaitable[Message], idle_s: float) -> Message:
    """Return the next part of a body, received by `receive()`. Raises ApiError (408) after `idle_s`."""
    try:
        return await run_within(idle_s, received)
    except TimeoutError:
        raise _too_slow(f"no byte of the body arrived for {idle_s:g} s") from None


def _too_slow(message: str) -> ApiError:
    # The rest of this body must not be parsed as the next request.
    return ApiError(408, "body_timeout", message, headers=(("connection", "close"),))


async def read_body(
    scope: Scope, receive: Receive, limits: RequestLimits, *, limit_bytes: int | None = None
) -> bytes:
    """Return the whole body. Raises ApiError (413 over the limit, 408 if it takes too long), ClientGone."""
    limit_bytes = limits.body_bytes if limit_bytes is None else min(limit_bytes, limits.body_bytes)
    announced = content_length(scope)
    if announced is not None and announced > limit_bytes:
        raise too_large(limit_bytes)
    began_s = time.monotonic()
    received = receive()
    if isinstance(received, Ready):
        message = received.value
    else:
        message = await next_chunk(received, min(limits.body_idle_s, limits.body_total_s))
    first = _chunk(message, 0, limit_bytes)
    if not message.get("more_body", False):
        return first
    left_s = limits.body_total_s - (time.monotonic() - began_s)
    try:
        return await run_within(left_s, _rest(first, receive, limit_bytes, limits.body_idle_s))
    except TimeoutError:
        raise _too_slow(f"the body took more than {limits.body_total_s:g} s") from None


async def _rest(first: bytes, receive: Receive, limit_bytes: int, idle_s: float) -> bytes:
    chunks = [first]
    size = len(first)
    while True:
        message = await next_chunk(receive(), idle_s)
        chunk = _chunk(message, size, limit_bytes)
        size += len(chunk)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _chunk(message: Message, before_bytes: int, limit_bytes: int) -> bytes:
    if message["type"] == "http.disconnect":
        raise ClientGone
    chunk: bytes = message.get("body", b"")
    if before_bytes + len(chunk) > limit_bytes:
        raise too_large(limit_bytes)
    return chunk


def structure(body: bytes, max_strings: int) -> bytes:
    """Return the commas and brackets of a JSON body outside of its strings, with `{}` as `[]`.

    Raises ApiError for more than `max_strings` strings.
    """
    # A few passes in C, whatever the body: its length is bounded, the number of its parts is not.
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(_AS_SQUARE, _NOT_STRUCTURE)
    if marks.count(b'"') > 2 * max_strings:
        raise _too_much(f"{max_strings} strings")
    return b"".join(marks.split(b'"')[::2])


def _check_depth(marks: bytes, limit: int) -> None:
    brackets = marks.translate(None, b",")
    for _ in range(limit):
        outer = brackets.replace(b"[]", b"")  # removes the innermost level
        if len(outer) == len(brackets):
            break
        brackets = outer
    if b"[]" in brackets or brackets.count(b"[") > limit:
        raise BadRequest(f"the JSON nests deeper than {limit} levels", code="json_too_deep")


def check_shape(body: bytes, bounds: JsonBounds, depth: int) -> None:
    """Raise ApiError if the JSON holds more than `bounds`, or nests deeper than `depth`."""
    openings = body.count(b"[") + body.count(b"{")
    quotes, commas = body.count(b'"'), body.count(b",")
    if openings <= depth and quotes <= bounds.strings and commas <= bounds.commas:
        return  # within bounds wherever its strings are
    if body.count(b"\\") > _MAX_ESCAPES:
        raise _too_much(f"{_MAX_ESCAPES} escapes")
    marks = structure(body, bounds.strings)
    if marks.count(b",") > bounds.commas:
        raise _too_much(f"{bounds.commas} elements")
    if max(marks.count(b"["), marks.count(b"]")) > bounds.containers:
        raise _too_much(f"{bounds.containers} arrays and objects")
    _check_depth(marks, depth)


def _too_much(what: str) -> ApiError:
    return ApiError(413, "too_complex", f"the body holds more than {what}")


def decode(
    body: bytes, decoder: msgspec.json.Decoder[T], limits: RequestLimits, bounds: JsonBounds | None = None
) -> T:
    """Return the body as `T`, within `bounds` (those of a text by default).

    Raises ApiError: 400 for malformed JSON, 413 over the bounds, 422 for a wrong shape.
    """
    check_shape(body, bounds or limits.text_json, limits.json_depth)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


def check_json(body: bytes, limits: RequestLimits, bounds: JsonBounds) -> None:
    """Raise ApiError unless the body is JSON within bounds; builds no objects."""
    decode(body, _ANY, limits, bounds)
    if body.isascii():
        return
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
