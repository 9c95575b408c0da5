"""Server-sent events: the head, comments, events and end of a stream, in order."""

import asyncio
import time

from starlette.types import Send

from gateway.http.limits import ClientGone
from gateway.http.responses import Headers
from rdmacast.aio.eager import StartedCoroutine, start_eagerly
from rdmacast.aio.time_limit import TimeLimit

_BODY = "http.response.body"
DONE = b"data: [DONE]\n\n"


def encode_event(data: bytes) -> bytes:
    """Return a JSON document (one line) as an event."""
    return b"data: " + data + b"\n\n"


def encode_comment(text: str) -> bytes:
    """Return a comment of one line, which clients ignore."""
    return b": " + text.replace("\n", " ").encode() + b"\n\n"


class ByteStream:
    """A streamed response; a client that reads nothing for `write_timeout_s` counts as gone."""

    def __init__(
        self, send: Send, write_timeout_s: float, media_type: str = "text/event-stream; charset=utf-8"
    ) -> None:
        self._send = send
        self._media_type = media_type
        self._write_timeout_s = write_timeout_s
        self._last_s = time.monotonic()
        self._order: asyncio.Lock  # of writes, once started: keepalives come from another task
        self.started = False
        self.ended = False

    def __repr__(self) -> str:
        state = "ended" if self.ended else "started" if self.started else "held"
        return f"<{type(self).__name__} {state}>"

    @property
    def quiet_s(self) -> float:
        """Seconds since the last write."""
        return time.monotonic() - self._last_s

    async def start(self, headers: Headers) -> None:
        """Send the head, once."""
        assert not self.started
        self.started, self._order = True, asyncio.Lock()
        raw = [
            *headers,
            (b"content-type", self._media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._write({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Send bytes. Raises ClientGone."""
        await self._write({"type": _BODY, "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes, once."""
        self.ended = True
        await self._write({"type": _BODY, "body": data, "more_body": False})

    async def _write(self, message: dict[str, object]) -> None:
        try:
            if self._order.locked():
                with TimeLimit(self._write_timeout_s):
                    async with self._order:
                        await self._send(message)
            else:
                started = start_eagerly(self._send(message))
                if isinstance(started, StartedCoroutine):
                    async with self._order:  # at once: it is free, and nothing was awaited since
                        with TimeLimit(self._write_timeout_s):
                            await started
        except TimeoutError:
            raise ClientGone("the client reads nothing") from None
        self._last_s = time.monotonic()


class EventStream(ByteStream):
    """An SSE response."""

    async def event(self, data: bytes) -> None:
        """Send a JSON document as an event."""
        await self._write({"type": _BODY, "body": encode_event(data), "more_body": True})

    async def comment(self, text: str) -> None:
        """Send a comment."""
        await self.write(encode_comment(text))
