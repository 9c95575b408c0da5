"""A light client of streamed completions that costs a few microseconds per token.

One connection per request; httptools parses the response, and only its end is kept.
"""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

# Upper bound of the last events of a stream together.
_TAIL_BYTES = 16_384


@dataclass(slots=True, kw_only=True)
class StreamResult:
    """The result of one request; times are from `time.perf_counter`, `failure` is empty on success."""

    request_id: str
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    start_kind: str = ""
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class StreamEndpoint:
    """The address and key for completion requests."""

    host: str
    port: int
    tls: bool
    api_key: str

    @classmethod
    def of(cls, url: str, api_key: str) -> "StreamEndpoint":
        """Parse an HTTP URL. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an HTTP URL: use http://HOST:PORT")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, api_key)

    def request(self, request_id: str, body: bytes) -> bytes:
        """Return the complete request as bytes."""
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"authorization: Bearer {self.api_key}\r\nx-request-id: {request_id}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        ).encode() + body


@dataclass(slots=True)
class _StreamProtocol(asyncio.Protocol):
    """Receives the response to one request."""

    streamed: StreamResult
    done: asyncio.Future[None]
    tail: bytes = b""
    started: bool = False
    before_s: float = 0.0
    now_s: float = 0.0
    complete: bool = False
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"malformed response: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._finish("" if self.complete else "connection lost")

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-start-kind":
            self.streamed.start_kind = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.streamed.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.tail = (self.tail + body)[-_TAIL_BYTES:]
        if not self.started:
            # Comments about the instance's start precede the first event.
            if b"data:" not in self.tail:
                return
            self.started = True
            self.streamed.first_s = self.now_s = time.perf_counter()
        self.before_s, self.now_s = self.now_s, time.perf_counter()

    def on_message_complete(self) -> None:
        self.complete = True
        # The last event holds no token: it is sent after billing.
        self.streamed.last_s = self.before_s
        self._finish(parse_tail(self.streamed, self.tail))

    def _finish(self, failure: str) -> None:
        if not self.done.done():
            self.streamed.failure = failure
            self.done.set_result(None)


def parse_tail(streamed: StreamResult, tail: bytes) -> str:
    """Read usage from the end of a response into `streamed`; return the failure, or ""."""
    if streamed.status != 200:
        return f"{streamed.status} {_error_code(tail)}"
    events = [line[5:].strip() for line in tail.splitlines() if line.startswith(b"data:")]
    if not events or events[-1] != b"[DONE]":
        return f"stream {_error_code(events[-1])}" if events else "stream without events"
    try:
        last = json.loads(events[-2])
        usage, facts = last["usage"], last["hypercast"]
        streamed.prompt_tokens = usage["prompt_tokens"]
        streamed.completion_tokens = usage["completion_tokens"]
        streamed.start_kind = facts["x_start_kind"]
    except (ValueError, LookupError, TypeError):
        return "stream without usage"
    return ""


def _error_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return "unknown"


async def stream_completion(
    target: StreamEndpoint, request_id: str, body: bytes, timeout_s: float
) -> StreamResult:
    """Request a completion and read it to its end; failures are reported in the result."""
    loop = asyncio.get_running_loop()
    streamed = StreamResult(request_id=request_id, sent_s=time.perf_counter())
    answer = _StreamProtocol(streamed, loop.create_future())
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: answer,
                target.host,
                target.port,
                ssl=ssl.create_default_context() if target.tls else None,
            )
            try:
                transport.write(target.request(request_id, body))
                await answer.done
            finally:
                transport.abort()
    except TimeoutError:
        streamed.failure = "timeout"
    except OSError as error:
        streamed.failure = f"connection: {error.strerror or type(error).__name__}"
    return streamed
