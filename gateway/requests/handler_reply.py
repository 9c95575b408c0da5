"""The reply of a custom handler: its JSON as it is, or its values as events."""

from starlette.types import Receive, Scope, Send

from gateway.contract import Assigned, DispatchError, Stage
from gateway.disconnect import Attended
from gateway.exchange import Exchange
from gateway.generation_reply import StageTeller, fail_stream
from gateway.ids import call_id
from gateway.job import Job
from gateway.limits import ClientGone
from gateway.responses import json_response
from gateway.services import Services
from gateway.sse import DONE, EventStream
from registry.function import FunctionVersion
from registry.messages import HandlerChunk, InvokeHandler, Usage


class HandlerReply:
    """Answers with JSON, or with SSE if the handler yields or the client asked for events.

    Only in the latter case is it known early enough to be a stream for comments while the function
    starts.
    """

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        version: FunctionVersion,
        body: bytes,
        *,
        events_wanted: bool,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._version = version
        self._body = body
        self._events_wanted = events_wanted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._services.settings.streams
        stream = EventStream(send, settings.write_timeout_s)
        job = Job(self._services, self._exchange, self._version)
        teller = StageTeller(stream, job, settings)
        tick = teller.tick if self._events_wanted else None
        try:
            async with Attended(receive, tick=tick, tick_in_s=settings.head_wait_s) as attended:
                async with job:
                    answer = await self._run(job, stream, teller)
                    if answer is None and not stream.started:
                        raise DispatchError("function_error", "the handler gave no answer", status=500)
                    await job.settle()
                attended.finish()
                if stream.started:
                    await stream.end(DONE)
                    return
            assert answer is not None
            await json_response(answer, headers=job.headers(final=True))(scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:  # an event, once the stream has begun
            await fail_stream(stream, error, self._exchange)

    async def _run(self, job: Job, stream: EventStream, teller: StageTeller) -> bytes | None:
        work = InvokeHandler(
            request_id=call_id(self._exchange.request_id, 0),
            instance_id="",
            body=self._body,
            timeout_s=self._services.settings.deadlines.total_s,
        )
        answer: bytes | None = None
        async with job.run(work) as run:
            async for event in run:
                match event:
                    case Stage():
                        await teller.stage(event)
                    case Assigned():
                        job.note_assigned(event)
                        if self._events_wanted:
                            await teller.assigned(event)
                    case HandlerChunk(data=data):
                        if event.stream and not stream.started:
                            await stream.start(job.headers(final=False))
                        if stream.started:
                            await stream.event(data)
                        else:
                            answer = data
                    case Usage():
                        break
        return answer
