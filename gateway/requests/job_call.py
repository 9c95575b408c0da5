"""The request of a job: that of any client, but that its response is collected. Its context has the key."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.types import Message, Scope

from gateway.core.errors import ApiError
from gateway.http.disconnect import CONNECTION_END, ConnectionEnd

_EVENT = re.compile(rb"^data: (.*)$", re.MULTILINE)
_JSON = msgspec.json.Decoder(msgspec.Raw)
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReply:
    """The response to a job's request: JSON, that of a stream as the list of its events.

    `code` and `retry_after_s` are those of an error.
    """

    status: int
    body: bytes
    code: str = ""
    retry_after_s: int | None = None


def error_reply(error: ApiError) -> JobReply:
    """Return an error as a reply."""
    return JobReply(
        status=error.status, body=error.envelope(), code=error.code, retry_after_s=error.retry_after_s
    )


def job_scope(path: str, end: ConnectionEnd) -> Scope:
    """Return the ASGI scope of a job's request; `end` takes the place of its client's connection."""
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        CONNECTION_END: end,
    }


class ReplyCollector:
    """The `send` of a job's request. It raises ApiError for a response over `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._status = 0
        self._is_stream = False
        self._chunks: list[bytes] = []
        self._nbytes = 0

    async def send(self, message: Message) -> None:
        """Collect a message."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
            return
        chunk = message.get("body", b"")
        self._nbytes += len(chunk)
        if self._nbytes > self._limit_bytes:
            self._chunks.clear()
            text = f"the result is larger than {self._limit_bytes} bytes, the limit of a job"
            raise ApiError(500, "result_too_large", text)
        self._chunks.append(chunk)

    def reply(self) -> JobReply:
        """Return the reply; an error that ended a stream is that of the call."""
        body = b"".join(self._chunks)
        if not self._is_stream:
            return JobReply(status=self._status, body=_checked(body))
        events = [event for event in _EVENT.findall(body) if event != _DONE]
        failure = _failure(events)
        if failure is not None:
            return failure
        return JobReply(status=self._status, body=_checked(b"[" + b",".join(events) + b"]"))


def _checked(body: bytes) -> bytes:
    """Return the body if it is JSON. Raises ApiError."""
    try:
        _JSON.decode(body)
    except msgspec.DecodeError:
        raise ApiError(500, "function_error", "the response is not JSON") from None
    return body


def _failure(events: Sequence[bytes]) -> JobReply | None:
    if not events or not events[-1].startswith(b'{"error":'):
        return None
    try:
        error = msgspec.json.decode(events[-1], type=dict[str, dict[str, object]])["error"]
        return JobReply(status=500, body=events[-1], code=str(error.get("code", "")))
    except (msgspec.DecodeError, KeyError):
        return None
