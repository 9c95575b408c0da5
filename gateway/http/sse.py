"""Server-sent events: one stream's head, comments, events and end, in that order."""

import asyncio
from collections.abc import Iterable

from starlette.types import Send

from gateway.limits import ClientGone
from registry.eager import within

DONE = b"data: [DONE]\n\n"
Headers = Iterable[tuple[str, str]]


def encode_event(data: bytes) -> bytes:
    """A JSON document (one line) as an event."""
    return b"data: " + data + b"\n\n"


def encode_comment(text: str) -> bytes:
    """A comment, which clients ignore; it must be one line."""
    return b": " + text.replace("\n", " ").encode() + b"\n\n"


class ByteStream:
    """A streamed response. Each write waits while the client is slow to take what was sent before;
    one that takes nothing for `write_timeout_s` counts as gone."""

    def __init__(self, send: Send, media_type: str, write_timeout_s: float) -> None:
        self._send = send
        self._media_type = media_type
        self._write_timeout_s = write_timeout_s
        self._last_s = asyncio.get_running_loop().time()
        self._order = asyncio.Lock()  # keepalives come from another task
        self.started = False
        self.ended = False

    def __repr__(self) -> str:
        state = "ended" if self.ended else "started" if self.started else "held"
        return f"<{type(self).__name__} {state}>"

    @property
    def quiet_s(self) -> float:
        """How long nothing was written."""
        return asyncio.get_running_loop().time() - self._last_s

    async def start(self, headers: Headers) -> None:
        """Send the head; once."""
        assert not self.started
        self.started = True
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        raw += [
            (b"content-type", self._media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._write({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, data: bytes) -> None:
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes; once."""
        self.ended = True
        await self._write({"type": "http.response.body", "body": data, "more_body": False})

    async def _write(self, message: dict[str, object]) -> None:
        try:
            await within(self._write_timeout_s, self._in_order(message))
        except TimeoutError:
            raise ClientGone("the client takes nothing") from None
        self._last_s = asyncio.get_running_loop().time()

    async def _in_order(self, message: dict[str, object]) -> None:
        async with self._order:
            await self._send(message)


class EventStream(ByteStream):
    """An SSE response."""

    def __init__(self, send: Send, write_timeout_s: float) -> None:
        super().__init__(send, "text/event-stream; charset=utf-8", write_timeout_s)

    async def event(self, data: bytes) -> None:
        await self.write(encode_event(data))

    async def comment(self, text: str) -> None:
        await self.write(encode_comment(text))
