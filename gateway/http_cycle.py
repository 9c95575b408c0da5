"""One request of an HTTP connection and its answer: uvicorn's cycle, with less to do for each of them."""

import asyncio
import logging
import re
from collections.abc import Callable

from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_log = logging.getLogger("uvicorn.error")
_UNLAWFUL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BODILESS = (204, 304)


class HttpCycle(RequestResponseCycle):
    """An application's `receive` and `send` for one request."""

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        on_response: Callable[..., None],
        *,
        expects_continue: bool,
        keep_alive: bool,
    ) -> None:
        self.scope = scope  # type: ignore[assignment]
        self.transport = transport
        self.flow = flow
        self.logger = _log
        self.on_response = on_response
        self.message_event = asyncio.Event()
        self.waiting_for_100_continue = expects_continue
        self.keep_alive = keep_alive
        self.disconnected = False
        self.body = bytearray()
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self._chunked = False
        self._left_bytes = 0  # of what content-length announced

    async def send(self, message: Message) -> None:  # type: ignore[override]
        """Raises RuntimeError for messages that do not make up one answer."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._start(message)
        elif message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._go_on(message.get("body", b""), message.get("more_body", False))
        else:
            raise RuntimeError(f"an unexpected message: {message['type']}")

    def _start(self, message: Message) -> None:
        status = message["status"]
        parts = [STATUS_LINE[status]]
        lines = 2
        sized = closes = False
        for given, value in message["headers"]:
            name = given.lower()
            if name == b"content-length" and not sized:
                sized, self._left_bytes = True, int(value)
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                sized = self._chunked = True
                self._left_bytes = 0
            elif name == b"connection" and b"close" in map(bytes.strip, value.lower().split(b",")):
                self.keep_alive, closes = False, True
            parts += (name, b": ", value, b"\r\n")
            lines += 1
        if not self.keep_alive and not closes:
            parts.append(b"connection: close\r\n")
            lines += 1
        if not sized and self.scope["method"] != "HEAD" and status not in _BODILESS:
            self._chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
            lines += 1
        parts.append(b"\r\n")
        head = b"".join(parts)
        # A header of more than a line would be several: all that are there are those written here.
        if head.count(b"\n") != lines or head.count(b"\r") != lines or _UNLAWFUL.search(head):
            raise RuntimeError("a header of the answer holds a control character")
        self.response_started = True
        self.waiting_for_100_continue = False
        self.transport.write(head)

    def _go_on(self, body: bytes, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._left_bytes = 0
        elif self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(piece if more else piece + b"0\r\n\r\n")
        else:
            self._left_bytes -= len(body)
            if self._left_bytes < 0:
                raise RuntimeError("the answer is longer than its content-length")
            self.transport.write(body)
        if more:
            return
        if self._left_bytes:
            raise RuntimeError("the answer is shorter than its content-length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
