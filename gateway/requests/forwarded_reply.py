"""The response of a request that passes through to another engine's server."""

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.core.contract import Assigned, DispatchError, WaitStage
from gateway.core.errors import ApiError, BadRequest
from gateway.core.request_context import RequestContext
from gateway.http.disconnect import CancelOnDisconnect
from gateway.http.limits import ClientGone
from gateway.http.responses import raw_json
from gateway.http.sse import EventStream
from gateway.requests.billed_request import BilledRequest
from gateway.requests.forwarded_chat import Relay
from gateway.requests.forwarding import ForwardPlan
from gateway.requests.generation_reply import StageReporter, fail_stream, usage_of
from gateway.requests.services import Services
from gateway.tenants.cost_estimates import WorkBound
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardPath, ForwardRequest
from registry.messages.node import RequestUsage
from registry.records.function import FunctionVersion

_MAX_MESSAGE = 2000


class ForwardedReply:
    """The server's response by way of a relay, with our headers; its errors become ours."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        version: FunctionVersion,
        path: ForwardPath,
        plan: ForwardPlan,
        relay: Relay,
    ) -> None:
        self._services = services
        self._context = context
        self._version = version
        self._path = path
        self._plan = plan
        self._relay = relay

    @property
    def bound(self) -> WorkBound:
        """What it computes at most."""
        return self._plan.bound

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._services.settings.streams
        stream = EventStream(send, settings.write_timeout_s)
        plan = self._plan
        job = BilledRequest(self._services, self._context, self._version, plan.bound, streams=plan.streams)
        reporter = StageReporter(stream, job, settings) if plan.streams else None
        tick = None if reporter is None else reporter.tick
        try:
            with CancelOnDisconnect(scope, tick=tick, tick_in_s=settings.head_wait_s) as guard:
                async with job:
                    body = await self._run(job, stream, reporter)
                    if not stream.started:
                        body = await self._relay.whole(body, usage_of(job))
                    await job.complete()
                guard.disarm()
                if stream.started:
                    await stream.end(self._relay.end(usage_of(job), job.facts()))
                else:
                    await raw_json(body, headers=job.headers(final=True))(scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:  # an event, once the stream has started
            await fail_stream(stream, error, self._context, self._relay.failure)

    async def _run(self, job: BilledRequest, stream: EventStream, reporter: StageReporter | None) -> bytes:
        """Pass on the events of a stream; return the body of a response that is none."""
        plan = self._plan
        work = ForwardRequest(request_id=job.next_call_id(), instance_id="", path=self._path, body=plan.body)
        head: ForwardedHead | None = None
        body, delivered = b"", 0
        async with job.run(work, plan.prefix) as run:
            async for event in run:
                match event:
                    case Assigned():
                        job.note_assigned(event)
                        if reporter is not None:
                            await reporter.assigned(event)
                    case WaitStage() if reporter is not None:
                        await reporter.stage(event)
                    case ForwardedHead():
                        head = event
                    case ForwardedChunk():
                        if head is None:
                            raise DispatchError("internal", "the node sent no head", status=500)
                        if head.status != 200:
                            raise refused(head.status, event.data)
                        if not head.is_stream:
                            body = event.data
                        elif event.data:
                            await self._pass_on(stream, job, event.data)
                        run.note_passed(event.completion_tokens - delivered)
                        delivered = event.completion_tokens
                    case RequestUsage():
                        break
        return body

    async def _pass_on(self, stream: EventStream, job: BilledRequest, data: bytes) -> None:
        if not stream.started:
            await stream.start(job.headers(final=False))
        if events := self._relay.pass_on(data):
            await stream.write(events)


def refused(status: int, body: bytes) -> ApiError:
    """Return the error of a response of the engine's server."""
    try:
        decoded: Any = msgspec.json.decode(body)
        given = decoded["error"] if isinstance(decoded.get("error"), dict) else decoded
        message = str(given["message"])[:_MAX_MESSAGE]
        param = given.get("param")
    except (msgspec.DecodeError, KeyError, AttributeError, TypeError):
        message, param = f"the engine's server answered with status {status}", None
    shown = param if isinstance(param, str) else None
    match status:
        case 404:
            return ApiError(404, "model_not_found", message, param="model")
        case 400 | 422:
            return BadRequest(message, param=shown)
        case 429 | 503:
            return ApiError(503, "overloaded", message, retry_after_s=5)
        case _ if status < 500:
            return BadRequest(message, param=shown)
        case _:
            return ApiError(500, "internal", message)
