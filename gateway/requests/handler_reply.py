"""The response of a custom handler: its JSON as it is, or its values as events."""

from starlette.types import Receive, Scope, Send

from gateway.core.contract import Assigned, DispatchError, WaitStage
from gateway.core.request_context import RequestContext
from gateway.http.disconnect import CancelOnDisconnect
from gateway.http.limits import ClientGone
from gateway.http.responses import send_json
from gateway.http.sse import DONE, EventStream
from gateway.requests.billed_request import BilledRequest
from gateway.requests.generation_reply import StageReporter, fail_stream
from gateway.requests.services import Services
from registry.messages.node import HandlerChunk, InvokeHandler, RequestUsage
from registry.records.function import FunctionVersion


class HandlerReply:
    """JSON, or SSE if the handler yields or the client accepts events.

    Only in the latter case the response is known to be a stream before the function has started, so that
    comments can report the start.
    """

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        version: FunctionVersion,
        body: bytes,
        *,
        events_wanted: bool,
    ) -> None:
        self._services = services
        self._context = context
        self._version = version
        self._body = body
        self._events_wanted = events_wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._services.settings.streams
        stream = EventStream(send, settings.write_timeout_s)
        job = BilledRequest(self._services, self._context, self._version)
        reporter = StageReporter(stream, job, settings) if self._events_wanted else None
        tick = None if reporter is None else reporter.tick
        try:
            with CancelOnDisconnect(scope, tick=tick, tick_in_s=settings.head_wait_s) as guard:
                async with job:
                    answer = await self._run(job, stream, reporter)
                    if answer is None and not stream.started:
                        raise DispatchError("function_error", "the handler returned nothing", status=500)
                    await job.complete()
                guard.disarm()
                if stream.started:
                    await stream.end(DONE)
                    return
            assert answer is not None
            await send_json(send, answer, headers=job.headers(final=True))
        except ClientGone:
            raise
        except Exception as error:  # an event, once the stream has started
            await fail_stream(stream, error, self._context)

    async def _run(
        self, job: BilledRequest, stream: EventStream, reporter: StageReporter | None
    ) -> bytes | None:
        work = InvokeHandler(
            request_id=job.next_call_id(),
            instance_id="",
            body=self._body,
            timeout_s=self._services.settings.deadlines.total_s,
        )
        answer: bytes | None = None
        async with job.run(work) as run:
            async for event in run:
                match event:
                    case Assigned():
                        job.note_assigned(event)
                        if reporter is not None:
                            await reporter.assigned(event)
                    case HandlerChunk(data=data):
                        if event.stream and not stream.started:
                            await stream.start(job.headers(final=False))
                        if stream.started:
                            await stream.event(data)
                        else:
                            answer = data
                            if event.usage is not None:
                                break
                    case RequestUsage():
                        break
                    case WaitStage() if reporter is not None:
                        await reporter.stage(event)
        return answer
