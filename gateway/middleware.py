"""What every request passes: its id, the gate, its key, and at the end its log line and metrics."""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import exchange as exchanges
from gateway.auth import authorize, is_open
from gateway.errors import ApiError, translate
from gateway.exchange import Exchange
from gateway.ids import request_id
from gateway.limits import ClientGone
from gateway.services import Services

_log = logging.getLogger("hypercast.access")

_FOLLOWS = "/logs"
CLIENT_GONE = 499  # for log and metrics alone: nobody is left to receive it


class RequestMiddleware:
    """The outermost layer. Turns every exception into the error envelope, so nothing above sees one."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
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
        reply = _Reply(send, exchange.request_id)
        try:
            await self._pass(scope, receive, reply, headers, exchange)
        except ClientGone:
            reply.status = CLIENT_GONE
        except Exception as error:
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
        gate = self._services.gate
        gate.enter()
        counted = True
        try:
            exchange.key = await self._services.auth.authenticate(headers.get(b"authorization"))
            authorize(exchange.key, scope["path"])
            if scope["path"].endswith(_FOLLOWS):
                gate.leave()  # somebody who watches the log holds up no shutdown
                counted = False
            if scope["path"].startswith("/admin/"):
                await self._app(scope, receive, reply.send)
            else:
                with self._services.concurrency.admit(exchange.key):
                    await self._app(scope, receive, reply.send)
        finally:
            if counted:
                gate.leave()

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
        _log.log(
            logging.DEBUG if open_path else logging.INFO,
            "%s %s %s %d %.1f ms function=%s:%d start=%s node=%s key=%s code=%s",
            exchange.request_id,
            scope["method"],
            scope["path"],
            status,
            taken_s * 1000,
            exchange.function or "-",
            exchange.version,
            exchange.start_kind or "-",
            exchange.node or "-",
            exchange.key.id if exchange.key else "-",
            exchange.error_code or "-",
        )
        if exchange.function and not scope["path"].startswith("/admin/"):
            metrics = self._services.metrics
            code = exchange.error_code or str(status)
            labels = (exchange.function, str(exchange.version), exchange.start_kind, code)
            metrics.requests.labels(*labels).inc()
            metrics.duration.labels(exchange.function).observe(taken_s)


class _Reply:
    """Adds the request id to the head and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self.status = 0
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            message = {**message, "headers": headers}
        await self._send(message)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The two headers that are read here; of repeated ones the first."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-request-id"):
            found.setdefault(name, value)
    return found
