"""The response of a generation: whole, or as an event stream."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from gateway.billing.request_record import completion_tokens, prompt_tokens
from gateway.core.contract import Assigned, WaitStage
from gateway.core.errors import ApiError, translate
from gateway.core.request_context import RequestContext
from gateway.core.settings import StreamSettings
from gateway.http.disconnect import CancelOnDisconnect
from gateway.http.limits import ClientGone
from gateway.http.responses import raw_json
from gateway.http.sse import EventStream, encode_event
from gateway.inference.assets import ModelAssets
from gateway.requests.billed_request import BilledRequest, run_all
from gateway.requests.generation import (
    ChoiceCallbacks,
    ChoiceDelta,
    ChoiceResult,
    GenerationChoice,
    run_choice,
)
from gateway.requests.reply_format import ReplyFormat, ReplyUsage
from gateway.requests.services import Services
from gateway.tenants.cost_estimates import WorkBound
from registry.records.function import FunctionVersion

_log = logging.getLogger("hypercast.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The inputs of a generation."""

    context: RequestContext
    version: FunctionVersion
    assets: ModelAssets
    choices: Sequence[GenerationChoice]
    format: ReplyFormat

    def bound(self) -> WorkBound:
        """Return what it computes at most."""
        prompts = {id(choice.prompt_ids): len(choice.prompt_ids) for choice in self.choices}
        return WorkBound(
            calls=len(self.choices),
            prompt_tokens=sum(prompts.values()),
            completion_tokens=sum([choice.sampling.max_tokens for choice in self.choices]),
        )


class WholeReply:
    """The response that is sent once all choices have ended."""

    def __init__(self, services: Services, plan: GenerationPlan) -> None:
        self._services = services
        self._plan = plan

    @property
    def bound(self) -> WorkBound:
        """What it computes at most."""
        return self._plan.bound()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._plan
        outcomes = [ChoiceResult() for _ in plan.choices]
        listener = ChoiceCallbacks(stage=_ignore, assigned=_ignore, delta=_Collector(outcomes).add)
        with CancelOnDisconnect(scope) as guard:
            async with BilledRequest(self._services, plan.context, plan.version, plan.bound()) as job:
                await run_all(plan.choices, lambda choice: run_choice(job, plan.assets, choice, listener))
                body = await plan.format.whole(outcomes, usage_of(job))
                await job.complete()
            guard.disarm()
            await raw_json(body, headers=job.headers(final=True))(scope, receive, send)


class StreamReply:
    """The response that is sent as text is generated."""

    def __init__(self, services: Services, plan: GenerationPlan) -> None:
        self._services = services
        self._plan = plan

    @property
    def bound(self) -> WorkBound:
        """What it computes at most."""
        return self._plan.bound()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan, settings = self._plan, self._services.settings.streams
        stream = EventStream(send, settings.write_timeout_s)
        job = BilledRequest(self._services, plan.context, plan.version, plan.bound(), streams=True)
        reporter = StageReporter(stream, job, settings)
        try:
            with CancelOnDisconnect(scope, tick=reporter.tick, tick_in_s=settings.head_wait_s) as guard:
                async with job:
                    writer = _ChoiceWriter(stream, plan, job)
                    listener = ChoiceCallbacks(
                        stage=reporter.stage, assigned=reporter.assigned, delta=writer.delta
                    )
                    await run_all(plan.choices, lambda choice: run_choice(job, plan.assets, choice, listener))
                    await job.complete()
                guard.disarm()
                await stream.end(writer.tail())
        except ClientGone:
            raise
        except Exception as error:  # an event, once the stream has started
            await fail_stream(stream, error, plan.context, plan.format.failure)


_LOADING = frozenset({"reserve", "fetch", "copy", "bind", "ready"})


class StageReporter:
    """The stream's head, and its comments while the request is held.

    The head waits for the assignment, which has the start kind, for at most `head_wait_s`; after that the
    start kind is a comment.
    """

    def __init__(self, stream: EventStream, job: BilledRequest, settings: StreamSettings) -> None:
        self._stream = stream
        self._job = job
        self._settings = settings
        self._latest = WaitStage(stage="queue", fraction=0.0)
        self._last_text = ""
        self._loaded = 0.0

    async def tick(self) -> float:
        """Send the head if it is late, else a keepalive if due; return the seconds until the next call."""
        stream, settings = self._stream, self._settings
        if stream.ended:
            return settings.keepalive_s
        if not stream.started:
            await stream.start(self._job.headers(final=False))
            await self._comment(self._latest)
        elif stream.quiet_s >= settings.keepalive_s:
            await stream.comment("keepalive")
        return max(0.01, settings.keepalive_s - stream.quiet_s)

    async def stage(self, event: WaitStage) -> None:
        """Report progress of the start, at most every `stage_every_s`."""
        moved = event.stage != self._latest.stage
        self._latest = event
        if self._stream.started and (moved or self._stream.quiet_s >= self._settings.stage_every_s):
            await self._comment(event)

    async def assigned(self, event: Assigned) -> None:
        """Send the head, or where it was sent already, the start kind as a comment."""
        if self._job.assigned is not event:
            return  # a further call of the same request
        if not self._stream.started:
            await self._stream.start(self._job.headers(final=False))
            return
        await self._stream.comment(f"start-kind={event.start_kind}")
        await self._stream.comment(f"server-timing={self._job.timing(final=False)}")

    async def _comment(self, event: WaitStage) -> None:
        if event.stage in _LOADING:
            # To the client the phases of a start are one load, whose progress never decreases.
            self._loaded = max(self._loaded, event.fraction)
            text = f"stage=load {self._loaded:.0%}"
        else:
            text = f"stage={event.stage} {event.fraction:.0%}"
        if text != self._last_text:
            self._last_text = text
            await self._stream.comment(text)


class _Collector:
    def __init__(self, outcomes: list[ChoiceResult]) -> None:
        self._outcomes = outcomes

    async def add(self, delta: ChoiceDelta) -> None:
        self._outcomes[delta.index].add(delta)


class _ChoiceWriter:
    """The writer of deltas; it holds back the end of the last choice until the request is billed."""

    def __init__(self, stream: EventStream, plan: GenerationPlan, job: BilledRequest) -> None:
        self._stream = stream
        self._plan = plan
        self._job = job
        self._opened: set[int] = set()
        self._open = len(plan.choices)
        self._last = ChoiceDelta(index=0, text="")

    async def delta(self, delta: ChoiceDelta) -> None:
        """Send a delta."""
        form = self._plan.format
        first = delta.index not in self._opened
        if first:
            self._opened.add(delta.index)
        if events := form.events(delta, first=first):
            await self._stream.write(events)
        if delta.finish_reason:
            self._open -= 1
            if self._open:
                await self._stream.write(form.finish(delta.index, delta.finish_reason))
            else:
                self._last = delta

    def tail(self) -> bytes:
        """Return what is sent after billing, in one write."""
        return self._plan.format.end(self._last, usage_of(self._job), self._job.facts())


def usage_of(job: BilledRequest) -> ReplyUsage:
    """Return the tokens of a request's calls so far."""
    return ReplyUsage(prompt=prompt_tokens(job.runs), completion=completion_tokens(job.runs))


async def _ignore(_: object) -> None:
    return None


def _failed(error: ApiError) -> bytes:
    return encode_event(error.envelope())


async def fail_stream(
    stream: EventStream,
    error: Exception,
    context: RequestContext,
    failure: Callable[[ApiError], bytes] = _failed,
) -> None:
    """Send an error as the events of `failure`; before the first byte, raise it to the middleware."""
    if not stream.started:
        raise error
    known = translate(error)
    if known is None:
        _log.error("request %s failed", context.request_id, exc_info=error)
        known = ApiError(500, "internal", f"internal error; request {context.request_id}")
    context.error_code = known.code
    async with asyncio.timeout(5):
        await stream.end(failure(known))
