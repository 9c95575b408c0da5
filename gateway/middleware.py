"""What every request passes: its id, the gate, its key, and at the end its log line and metrics."""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import exchange as exchanges
from gateway.access_log import AccessLog
from gateway.auth import authorize, is_open
from gateway.drain import Draining, Gate, Phase
from gateway.errors import ApiError, translate
from gateway.exchange import Exchange
from gateway.ids import request_id
from gateway.limits import ClientGone
from gateway.services import Services
from registry.eager import Begun, begin
from registry.time_limit import TimeLimit

_log = logging.getLogger("hypercast.gateway")

_PATH_TOLD = 256  # bytes of a path in the access log
_FOLLOWS = "/logs"
_UPLOADS = "/admin/blobs/"
_READ = frozenset({b"authorization", b"x-request-id", b"content-length", b"transfer-encoding"})
CLIENT_GONE = 499  # for log and metrics alone: nobody is left to receive it


class RequestMiddleware:
    """The outermost layer. Turns every exception into the error envelope, so nothing above sees one."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._access = AccessLog()
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = self._services.clock
        headers = _headers(scope)
        exchange = Exchange(
            request_id=request_id(headers.get(b"x-request-id")),
            received_at=clock.wall_s(),
            received_s=clock.monotonic_s(),
        )
        exchanges.put(scope, exchange)
        reply = _Reply(send, exchange, self._services)
        try:
            await self._pass(scope, receive, reply, headers, exchange)
        except ClientGone:
            reply.status = CLIENT_GONE
        except asyncio.CancelledError:
            # The server cancels what is left when its time to go has come.
            if self._services.gate.phase is not Phase.DRAINING:
                raise
            await self._fail(Draining(), reply, exchange)
        except Exception as error:  # whatever it is, somebody waits for an answer
            await self._fail(error, reply, exchange)
        finally:
            self._finish(scope, exchange, reply.status)

    async def _pass(
        self,
        scope: Scope,
        receive: Receive,
        reply: "_Reply",
        headers: dict[bytes, bytes],
        exchange: Exchange,
    ) -> None:
        if is_open(scope["path"]):
            await self._app(scope, receive, reply.send)
            return
        place = _Place(self._services.gate, receive, brings_body=_brings_body(scope, headers))
        try:
            exchange.key = await self._services.auth.authenticate(headers.get(b"authorization"))
            place.claim(exchange.key.tenant)
            authorize(exchange.key, scope["path"])
            if scope["path"].endswith(_FOLLOWS):
                place.leave()  # somebody who watches the log holds up no shutdown
            if scope["path"].startswith("/admin/") or not exchange.key.limited:
                await self._app(scope, place.receive, reply.send)
            else:
                async with self._services.quotas.admit(exchange):
                    await self._app(scope, place.receive, reply.send)
        finally:
            place.leave()

    async def _fail(self, error: Exception, reply: "_Reply", exchange: Exchange) -> None:
        known = translate(error)
        if known is None:
            _log.error("request %s failed", exchange.request_id, exc_info=error)
            known = ApiError(500, "internal", f"the gateway failed; request {exchange.request_id}")
        exchange.error_code = known.code
        if reply.started:
            # Half a response cannot be taken back: leaving the body short tells the client.
            return
        body = known.envelope()
        raw = [(name.encode(), value.encode("latin-1")) for name, value in known.all_headers()]
        raw += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await reply.send({"type": "http.response.start", "status": known.status, "headers": raw})
        await reply.send({"type": "http.response.body", "body": body})

    def _finish(self, scope: Scope, exchange: Exchange, status: int) -> None:
        taken_s = self._services.clock.monotonic_s() - exchange.received_s
        open_path = is_open(scope["path"])
        if not open_path:
            self._access.line(
                f"{exchange.request_id} {scope['method']} {_told(scope)} {status} {taken_s * 1000:.1f} ms "
                f"function={exchange.function or '-'}:{exchange.version} start={exchange.start_kind or '-'} "
                f"node={exchange.node or '-'} key={exchange.key.id if exchange.key else '-'} "
                f"code={exchange.error_code or '-'}"
            )
        metrics, code = self._services.metrics, exchange.error_code or str(status)
        if exchange.function and not scope["path"].startswith("/admin/"):
            labels = (exchange.function, str(exchange.version), exchange.start_kind, code)
            metrics.requests.labels(*labels).inc()
            metrics.duration.labels(exchange.function).observe(taken_s)
        elif status == 429:
            metrics.requests.labels("", "", "", code).inc()  # refused before its body was read


class _Place:
    """A request's place at the gate: arriving until its body (if it `brings_body`) is there, then in
    flight."""

    def __init__(self, gate: Gate, receive: Receive, *, brings_body: bool) -> None:
        self._gate = gate
        self._receive = receive
        self._left = False
        self._tenant: str | None = None
        self._arriving = brings_body
        if self._arriving:
            gate.arrive()
        else:
            gate.enter()

    async def receive(self) -> Message:
        message = await self._receive()
        if self._arriving and message["type"] == "http.request" and not message.get("more_body", False):
            self._gate.arrived()
            self._arriving = False
        return message

    def claim(self, tenant: str) -> None:
        """Raises ApiError (503) if the tenant has too many places."""
        self._gate.claim(tenant)
        self._tenant = tenant

    def leave(self) -> None:
        """Idempotent."""
        if self._left:
            return
        self._left = True
        if self._tenant is not None:
            self._gate.release(self._tenant)
        if self._arriving:
            self._gate.give_up()
        else:
            self._gate.leave()


def _brings_body(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    if scope["path"].startswith(_UPLOADS):
        return False  # an upload is in flight from its beginning, for it is worked on as it comes
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


class _Reply:
    """Adds the request id and what is left of the key's rates to the head, and remembers the status.

    A client that takes nothing of a whole reply for `write_timeout_s` counts as gone, as one of a stream
    does (gateway/sse.py).
    """

    def __init__(self, send: Send, exchange: Exchange, services: Services) -> None:
        self._send = send
        self._write_timeout_s = services.settings.streams.write_timeout_s
        self._quotas = services.quotas
        self._exchange = exchange
        self.status = 0
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            named = (b"x-request-id", self._exchange.request_id.encode())
            headers = [*message.get("headers", ()), named, *self._exchange.rate_headers]
            message = {**message, "headers": headers}
        elif message.get("more_body", False):
            await self._send(message)  # of a stream, which keeps its own time
            return
        elif self._exchange.place is not None:
            self._quotas.leave(self._exchange)
            await self._quotas.left(self._exchange)
        begun = begin(self._send(message))
        if not isinstance(begun, Begun):
            return
        try:
            with TimeLimit(self._write_timeout_s):
                await begun
        except TimeoutError:
            raise ClientGone("the client takes nothing") from None


def _told(scope: Scope) -> str:
    """The path as it was sent, percent signs and all: decoded it could end the line and forge others."""
    path: str = scope["raw_path"][:_PATH_TOLD].decode("ascii", "backslashreplace")
    return path if path.isprintable() else repr(path)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The headers that are read here; of repeated ones the first."""
    return {name: value for name, value in reversed(scope["headers"]) if name in _READ}
