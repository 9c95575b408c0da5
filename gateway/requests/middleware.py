"""The layer around all requests: id, in-flight limit, key, quotas, errors, log line and metrics."""

import asyncio
import logging
from collections.abc import Awaitable
from functools import lru_cache

from starlette.types import Message, Receive, Scope, Send

from gateway.core.error_forms import error_body, error_form
from gateway.core.errors import ApiError, translate
from gateway.core.ids import client_request_id, new_request_id
from gateway.core.request_context import RequestContext, attach
from gateway.core.request_trace import caller_trace
from gateway.core.rights import Right
from gateway.http.access_log import AccessEntry, AccessLog
from gateway.http.disconnect import ConnectionEnd
from gateway.http.drain import GatewayDraining, InFlightLimiter, ServingPhase
from gateway.http.limits import ClientGone
from gateway.requests.job_call import JobReply, ReplyCollector, error_reply, job_scope
from gateway.requests.routing import Endpoint, Router
from gateway.requests.services import Services
from gateway.requests.spans import ServedRequest, request_span
from gateway.tenants.auth import require_right
from rdmacast.aio.eager import COMPLETED, Ready, run_within
from registry.logs.context import LogContext, log_context

_log = logging.getLogger("hypercast.gateway")

_LOGGED_PATH_BYTES = 256  # of a path in the access log
_SMALL_BODY_BYTES = 64 << 10  # of bodies up to this size only the number of requests is bounded
CLIENT_GONE = 499  # for log and metrics only: no client is left


class RequestMiddleware:
    """The outermost layer, which turns every exception into the error envelope."""

    def __init__(self, router: Router, services: Services) -> None:
        self._router = router
        settings = services.settings
        self._access = AccessLog(settings.log_format, settings.gateway_id or "gateway")
        self._services = services
        self._logs_context = settings.log_format == "json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = self._services.clock
        headers = _headers(scope)
        context = RequestContext(
            request_id=new_request_id(),
            client_request_id=client_request_id(headers.get(b"x-request-id")),
            received_at=clock.wall_s(),
            received_s=clock.monotonic_s(),
        )
        attach(scope, context)
        if self._logs_context:
            log_context.set(LogContext(context.request_id))
        endpoint = self._router.find(scope)
        reply = _ReplySender(send, context, self._services)
        try:
            await self._pass(endpoint, scope, receive, reply, headers, context)
        except ClientGone:
            reply.status = CLIENT_GONE
        except asyncio.CancelledError:
            # The server cancels what outlasts the grace time.
            if self._services.limiter.phase is not ServingPhase.DRAINING:
                raise
            await self._fail(GatewayDraining(), scope, reply, context)
        except Exception as error:  # whatever it is, the client waits for a response
            await self._fail(error, scope, reply, context)
            if endpoint.audit is not None:
                await self._services.changes.note_refused(endpoint.audit, scope, context, reply.status)
        finally:
            self._finish(endpoint, scope, context, reply.status)

    async def run_job(
        self, path: str, body: bytes, context: RequestContext, end: ConnectionEnd, *, limit_bytes: int
    ) -> JobReply:
        """Return the response to the request of a job, whose context has its key and is admitted.

        A lost `end` cancels it, with status 499, as the end of a client's connection does.
        """
        scope = job_scope(path, end)
        attach(scope, context)
        endpoint, collector = self._router.find(scope), ReplyCollector(limit_bytes)

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            require_right(context.caller, endpoint.needs, path)
            await endpoint(scope, receive, collector.send)
            reply = collector.reply()
        except ClientGone:
            reply = JobReply(status=CLIENT_GONE, body=b"", code="cancelled")
        except Exception as error:  # whatever it is, it is the job's result
            reply = error_reply(self._translated(error, path, context))
        context.error_code = reply.code
        self._finish(endpoint, scope, context, reply.status)
        return reply

    async def _pass(
        self,
        endpoint: Endpoint,
        scope: Scope,
        receive: Receive,
        reply: "_ReplySender",
        headers: dict[bytes, bytes],
        context: RequestContext,
    ) -> None:
        if endpoint.needs is Right.NONE:
            await endpoint(scope, receive, reply.send)
            return
        length = headers.get(b"content-length", b"0")
        has_body = not endpoint.streamed_body and (length != b"0" or b"transfer-encoding" in headers)
        slot = _InFlightRequest(self._services.limiter, receive, has_body=has_body)
        try:
            auth, header = self._services.auth, _authorization(headers)
            context.key = auth.known(header) or await auth.authenticate(header)
            slot.tenant = self._services.limiter.charge(context.key.tenant)
            require_right(context.key, endpoint.needs, scope["path"])
            if self._services.tracing is not None or self._logs_context:
                self._trace(endpoint, headers, context)
            if endpoint.follows:
                slot.release()  # following a log must not delay a shutdown
            copy = self._services.shadows.copy(slot.receive, context) if endpoint.metered else None
            receive = slot.receive if copy is None else copy.receive
            try:
                if not (endpoint.metered and context.key.limited):
                    await endpoint(scope, receive, reply.send)
                else:
                    async with self._services.quotas.admit(context):
                        await endpoint(scope, receive, reply.send)
                if copy is not None:
                    self._services.shadows.send(endpoint, scope, copy, context)
            finally:
                if copy is not None:
                    copy.release()
        finally:
            slot.release()

    def _trace(self, endpoint: Endpoint, headers: dict[bytes, bytes], context: RequestContext) -> None:
        """Begin the request's trace, if it is sampled. Callers without a key cannot use up its rate."""
        caller, tracing = caller_trace(headers), self._services.tracing
        if caller is not None:
            context.trace_id = caller.context.trace_name
        if tracing is not None and endpoint.path:
            context.trace = tracing.begin(caller, endpoint.path)
            if context.trace is not None:
                context.trace_id = context.trace.own.trace_name
        if self._logs_context and context.trace_id:
            log_context.set(LogContext(context.request_id, context.trace_id))

    async def _fail(
        self, error: Exception, scope: Scope, reply: "_ReplySender", context: RequestContext
    ) -> None:
        known = self._translated(error, scope["path"], context)
        context.error_code = known.code
        if reply.started:
            # The head is sent: a body that is too short shows the client the failure.
            return
        body = error_body(known, error_form(scope["path"]), context.response_id)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in known.all_headers()]
        raw += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await reply.send({"type": "http.response.start", "status": known.status, "headers": raw})
        await reply.send({"type": "http.response.body", "body": body})

    def _translated(self, error: Exception, path: str, context: RequestContext) -> ApiError:
        known = translate(error, path)
        if known is None:
            _log.error("request %s failed", context.request_id, exc_info=error)
            known = ApiError(500, "internal", f"internal error; request {context.request_id}")
        return known

    def _finish(self, endpoint: Endpoint, scope: Scope, context: RequestContext, status: int) -> None:
        duration_s = self._services.clock.monotonic_s() - context.received_s
        if endpoint.needs is not Right.NONE:
            path = _logged_path(scope["raw_path"][:_LOGGED_PATH_BYTES])
            self._access.add(
                AccessEntry(
                    request_id=context.request_id,
                    trace_id=context.trace_id,
                    method=scope["method"],
                    path=path,
                    status=status,
                    duration_ms=round(duration_s * 1000, 1),
                    function=context.function,
                    version=context.version,
                    start_kind=context.start_kind,
                    node=context.node,
                    key=context.key.id if context.key else "",
                    client_request_id=context.client_request_id,
                    code=context.error_code,
                )
            )
            if (trace := context.trace) is not None:
                ended_at = context.received_at + duration_s
                served = ServedRequest(method=scope["method"], path=path, status=status, ended_at=ended_at)
                trace.tracer.record(request_span(context, trace, served))
        metrics, code = self._services.metrics, context.error_code or str(status)
        if context.function and endpoint.metered:
            labels = (context.function, str(context.version), context.start_kind, code)
            metrics.requests[labels] += 1
            metrics.duration.observe((context.function,), duration_s)
        elif status == 429:
            metrics.requests["", "", "", code] += 1  # refused before its body was read
        if status == 429 and metrics.tenants is not None and context.key is not None:
            metrics.tenants.note_limited(context.key.tenant)


class _InFlightRequest:
    """A request's slot of the limiter: in flight once its body (with `has_body`) has arrived."""

    def __init__(self, limiter: InFlightLimiter, receive: Receive, *, has_body: bool) -> None:
        self._limiter = limiter
        self._receive = receive
        self._released = False
        self._body_bytes = 0
        self._charged_bytes = 0
        self.tenant: str | None = None  # to which the slot was charged
        self._arriving = has_body
        if self._arriving:
            limiter.begin_body()
        else:
            limiter.acquire()

    def receive(self) -> Awaitable[Message]:
        received = self._receive()
        if self._arriving:
            if not isinstance(received, Ready):
                return self._received(received)
            self._note_arrival(received.value)
        return received

    async def _received(self, received: Awaitable[Message]) -> Message:
        message = await received
        self._note_arrival(message)
        return message

    def _note_arrival(self, message: Message) -> None:
        if not self._arriving or message["type"] != "http.request":
            return
        self._body_bytes += len(message.get("body", b""))
        if self._body_bytes > _SMALL_BODY_BYTES and self.tenant is not None:
            self._limiter.charge_body(self.tenant, self._body_bytes - self._charged_bytes)
            self._charged_bytes = self._body_bytes
        if not message.get("more_body", False):
            self._limiter.admit()
            self._arriving = False

    def release(self) -> None:
        """Free the slot. Idempotent."""
        if self._released:
            return
        self._released = True
        if self.tenant is not None:
            self._limiter.refund(self.tenant)
            if self._charged_bytes:
                self._limiter.refund_body(self.tenant, self._charged_bytes)
        if self._arriving:
            self._arriving = False  # what still arrives, of a request that was released early, counts nowhere
            self._limiter.abandon_body()
        else:
            self._limiter.release()


class _ReplySender:
    """The `send` of the handlers: it adds the request id and rate limits to the head, and keeps the status.

    A client that reads nothing of a whole response for `write_timeout_s` counts as gone, as with streams
    (gateway/http/sse.py).
    """

    def __init__(self, send: Send, context: RequestContext, services: Services) -> None:
        self._send = send
        self._write_timeout_s = services.settings.streams.write_timeout_s
        self._quotas = services.quotas
        self._context = context
        self.status = 0
        self.started = False

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message; those of a stream's body go straight to the server, which times them itself."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            named = (b"x-request-id", self._context.response_id.encode())
            headers = [*message.get("headers", ()), named, *self._context.rate_headers]
            if (trace := self._context.trace) is not None:
                headers.append((b"traceresponse", trace.own.header.encode()))
            message = {**message, "headers": headers}
        elif message.get("more_body", False):
            return self._send(message)
        elif self._context.lease is not None:
            return self._send_released(message)
        sent = self._send(message)
        return sent if sent is COMPLETED else self._timed(sent)

    async def _send_released(self, message: Message) -> None:
        self._quotas.release(self._context)
        await self._quotas.wait_released(self._context)
        await self._timed(self._send(message))

    async def _timed(self, sent: Awaitable[None]) -> None:
        try:
            await run_within(self._write_timeout_s, sent)
        except TimeoutError:
            raise ClientGone("the client reads nothing") from None


@lru_cache(256)
def _logged_path(raw: bytes) -> str:
    """Return the path undecoded: decoded it could end the line and forge others."""
    path = raw.decode("ascii", "backslashreplace")
    return path if path.isprintable() else repr(path)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers; of repeated ones the first."""
    return dict(reversed(scope["headers"]))


def _authorization(headers: dict[bytes, bytes]) -> bytes | None:
    """Return the Authorization header; a key in `x-api-key`, as Anthropic's clients send it, as one."""
    given = headers.get(b"authorization")
    if given is None and (key := headers.get(b"x-api-key")) is not None:
        return b"Bearer " + key
    return given
