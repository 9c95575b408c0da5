"""One HTTP request on a connection of its own, as cheap as a client can be."""

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """The address and key for requests."""

    host: str
    port: int
    tls: bool
    api_key: str

    @classmethod
    def of(cls, url: str, api_key: str) -> "HttpEndpoint":
        """Parse an HTTP URL. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an HTTP URL: use http://HOST:PORT")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, api_key)

    def request(self, request_id: str, body: bytes, path: str = "/v1/completions") -> bytes:
        """Return the complete request as bytes."""
        return (
            f"POST {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"authorization: Bearer {self.api_key}\r\nx-request-id: {request_id}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        ).encode() + body


@dataclass(slots=True)
class ResponseReader(asyncio.Protocol):
    """Receives one response; `failure` is why it cannot be read. Subclasses take its body."""

    done: asyncio.Future[None] = field(init=False)
    connected: bool = False
    status: int = 0
    complete: bool = False
    failure: str = ""
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connected = True

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failure = f"malformed response: {error}"
            self.finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.finish()

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_message_complete(self) -> None:
        self.complete = True
        self.finish()

    def finish(self) -> None:
        """Read no more. Idempotent."""
        if not self.done.done():
            self.done.set_result(None)

    async def read(
        self, endpoint: HttpEndpoint, request: bytes, timeout_s: float, connect_s: float | None = None
    ) -> None:
        """Send the request and read the response to its end, within `timeout_s` in all.

        Raises TimeoutError, also without a connection after `connect_s`; OSError.
        """
        tls = ssl.create_default_context() if endpoint.tls else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            async with asyncio.timeout(connect_s):
                transport, _ = await loop.create_connection(
                    lambda: self, endpoint.host, endpoint.port, ssl=tls
                )
            try:
                transport.write(request)
                await self.done
            finally:
                transport.abort()


def error_code(body: bytes) -> str:
    """Return the code of an error's envelope."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return "unknown"
