"""HTTP/1.1 with a bounded head: uvicorn's own protocol accepts heads of any length and duration."""

import asyncio
import math
import socket
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import Message, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.core.errors import ApiError
from gateway.core.ids import new_request_id
from gateway.http.connections import NO_LIMIT, ConnectionLimiter
from gateway.http.disconnect import CONNECTION_END, ConnectionEnd
from rdmacast.aio.closing import abort_when_received, close_soon
from rdmacast.aio.eager import COMPLETED, Ready

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
# Requests that wait for the response before theirs. Each takes small objects, whose memory Python gives back
# only when the whole MiB around them is free.
MAX_PIPELINED = 4
_UNSENT_BYTES = 16 << 10
_ASGI = {"version": "3.0", "spec_version": "2.3"}
# When the server shuts down, a connection without a request has this long to send one, which is refused: the
# client has connected, and may have sent it.
_LAST_REQUEST_S = 1.0
_FIELD_BYTES = 4  # the colon, a space and the line's end


class _HeadTooLarge(Exception):
    """A head too many, or too long: the parser ends with it, and calls `send_400_response`."""


class _UnwaitedEvent(asyncio.Event):
    """The event of a request for whose messages nothing waits."""

    def __init__(self) -> None: ...

    def set(self) -> None: ...


_UNWAITED = _UnwaitedEvent()


class _WholeResponseCycle(RequestResponseCycle):
    """One request and its response; a head with a content length is sent in one write with the body.

    Two writes would be two system calls here, and two wake-ups of the client.
    """

    head: Any = None  # while it is held back
    body_taken = False

    def receive(self) -> Awaitable[Any]:  # type: ignore[override]
        """Return the next message; a body that has arrived is not waited for."""
        ended = self.disconnected or self.response_complete
        if self.more_body or self.body_taken or self.waiting_for_100_continue or ended:
            if self.message_event is _UNWAITED:
                self.message_event = asyncio.Event()
                if self.body or not (self.more_body or self.body_taken):
                    self.message_event.set()
            return super().receive()
        self.body_taken = True
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.message_event is not _UNWAITED:
            self.message_event.clear()
        message = {"type": "http.request", "body": bytes(self.body), "more_body": False}
        self.body = bytearray()
        return Ready(message)

    def send(self, message: Any) -> Awaitable[None]:  # type: ignore[override]
        """Send a message; of a whole response nothing is awaited, unless the client reads too slowly."""
        if message["type"] == "http.response.start":
            # Uvicorn's own error replaces a head that got no body.
            self.head = message if self._is_whole(message) else None
            if self.head is not None:
                return COMPLETED
        elif self.head is not None:
            head, self.head = self.head, None
            if self.flow.write_paused or self.disconnected or message.get("more_body", False):
                return self._send_apart(head, message)
            self._write(head, message.get("body", b""))
            return COMPLETED
        return super().send(message)

    async def _send_apart(self, head: Any, message: Any) -> None:
        await super().send(head)
        await super().send(message)

    def _is_whole(self, head: Message) -> bool:
        """Return whether a response may be written here: it has a length and nothing special."""
        if self.scope["method"] == "HEAD" or not self.keep_alive:
            return False
        headers = dict(head["headers"])
        return b"content-length" in headers and b"connection" not in headers

    def _write(self, head: Message, body: bytes) -> None:
        parts = [STATUS_LINE[head["status"]]]
        headers = head["headers"]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
            if name == b"content-length" and int(value) != len(body):
                raise RuntimeError(f"a response of {len(body)} bytes has a head for {int(value)}")
        parts += (b"\r\n", body)
        names, values = map(b"".join, zip(*headers, strict=True))
        if HEADER_RE.search(names) or HEADER_VALUE_RE.search(values):
            raise RuntimeError("a response header holds characters that are not allowed")
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        self.transport.write(b"".join(parts))
        if self.message_event is not _UNWAITED:
            self.message_event.set()
        self.on_response()


def _nothing() -> None: ...


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection that refuses heads that are too long (431), too slow (408) or malformed (400).

    It buffers little for a client that does not read, and drops one that reads nothing for `stuck_s`. The
    parser reports only whole fields, so bytes of an endless header, chunk extension or trailer are counted
    too.
    """

    cycle: _WholeResponseCycle

    def __init__(
        self,
        *arguments: Any,
        head_s: float = 30.0,
        first_byte_s: float = 10.0,
        stuck_s: float = 60.0,
        connections: ConnectionLimiter | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._connections = connections or ConnectionLimiter(NO_LIMIT)
        self.is_made = False
        self._address = ""  # under which the connection is counted
        self._head_s = head_s
        self._first_byte_s = min(first_byte_s, head_s)
        self._stuck_s = stuck_s
        self._timer: asyncio.TimerHandle | None = None
        self._head_until_s = 0.0
        self._fields_bytes = 0
        self._without_progress = 0
        self._refused = False
        self._in_head = False
        self._end = ConnectionEnd(self.loop)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bound_unsent(transport)
        address = str(self.client[0]) if self.client else "local"
        self.is_made = True
        if self._address or self._connections.admit(address):
            self._address = self._address or address
            self._start_head_timer(self._first_byte_s)
            if self._connections.is_closing:
                self.shutdown()
        else:
            message = "this gateway has too many open connections, in all or from this address: retry"
            self._refuse(ApiError(503, "overloaded", message, retry_after_s=1))

    def admitted(self, address: str) -> None:
        """Take over a connection that was counted under this address before it was made."""
        self._address = address

    def shutdown(self) -> None:
        """Close as the server shuts down: after the response under way, or to a request yet to come."""
        if self.cycle is not None and not (self._in_head and self.cycle.response_complete):
            super().shutdown()
        elif not self.transport.is_closing():
            self._stop_head_timer()
            self._timer = self.loop.call_later(_LAST_REQUEST_S, close_soon, self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._address:
            self._connections.release(self._address)
        for cycle, _ in self.pipeline:
            cycle.on_response = _nothing  # else it would hold this object, and this object it
        self.pipeline.clear()
        super().connection_lost(exc)
        self._end.set_lost()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._without_progress += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._without_progress > MAX_HEAD_BYTES:
            self._refuse_size()
        if self._in_head:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._fields_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._fields_bytes += len(url)
        if self._fields_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        headers = self.headers
        headers.append((name, value))
        self._fields_bytes += len(name) + len(value) + _FIELD_BYTES
        if self._fields_bytes > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS:
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        self._without_progress = 0
        self._in_head = False
        if self._timer is not None:
            self._stop_head_timer()
        parser, before = self.parser, self.cycle
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _HeadTooLarge
        version = parser.get_http_version()
        self.cycle = _WholeResponseCycle(
            scope=self._scope(version),  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],
            message_event=_UNWAITED,
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and parser.should_keep_alive() and not self._connections.is_closing,
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # responses to pipelined requests go out in order
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._without_progress = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        if cycle.message_event is not _UNWAITED:
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._without_progress = 0
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            if cycle.message_event is not _UNWAITED:
                cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Continue after a response; one timer closes an idle connection, whatever its requests were."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            abort_when_received(self.transport)
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since_s = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._on_idle_timer)

    def _on_idle_timer(self) -> None:
        self._idle_timer = None
        is_idle = self.cycle.response_complete and not self._in_head
        idle_s = self.loop.time() - self._idle_since_s if is_idle else 0.0
        if idle_s < self.timeout_keep_alive:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive - idle_s, self._on_idle_timer)
        else:
            close_soon(self.transport)

    def _scope(self, version: str) -> Scope:
        url = self.url
        if url.startswith(b"/") and b"?" not in url and b"#" not in url:
            raw_path, query = url, b""
        else:
            parsed = httptools.parse_url(url)
            raw_path, query = parsed.path, parsed.query or b""
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": self.parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            CONNECTION_END: self._end,
        }

    def send_400_response(self, msg: str) -> None:
        if self._fields_bytes > MAX_HEAD_BYTES or len(self.headers or ()) > MAX_HEADERS:
            self._refuse_size()
        else:
            self._refuse(ApiError(400, "bad_http", "this is not a valid HTTP/1.1 request"))

    def _bound_unsent(self, transport: asyncio.Transport) -> None:
        """Bound the unsent bytes, of which the kernel would buffer megabytes."""
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(self._stuck_s * 1000))

    def _start_head_timer(self, wait_s: float | None = None) -> None:
        if self._timer is None:
            self._head_until_s = self.loop.time() + self._head_s
            self._timer = self.loop.call_later(wait_s or self._head_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_timeout(self) -> None:
        self._timer = None
        left_s = self._head_until_s - self.loop.time()
        if self.flow.read_paused:  # the rest of the head may have arrived, but is not read yet
            self._start_head_timer()
        elif self._without_progress and left_s > 0:
            self._timer = self.loop.call_later(left_s, self._on_head_timeout)
        elif self._without_progress or (self._in_head and self.url):
            self._refuse(
                ApiError(408, "head_timeout", f"the request's head took more than {self._head_s:g} s")
            )
        else:
            close_soon(self.transport)

    def _refuse_size(self) -> None:
        message = f"the request line and headers are over {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
        self._refuse(ApiError(431, "head_too_large", message))

    def _refuse(self, error: ApiError) -> None:
        """Respond and close; only close where a response is under way."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle  # the last request's; an earlier one's may be under way
        started = cycle is not None and (cycle.response_started or cycle.head is not None)
        if not self.pipeline and (not started or cycle.response_complete):
            body = error.envelope()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: {new_request_id()}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        close_soon(self.transport)
