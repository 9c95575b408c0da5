"""The reply of a generation: whole, or as an event stream."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from gateway.assets import ModelAssets
from gateway.billing import completion_tokens, prompt_tokens
from gateway.contract import Assigned, Stage
from gateway.disconnect import Attended
from gateway.errors import ApiError, translate
from gateway.exchange import Exchange
from gateway.formats import Format, usage_json
from gateway.generation import Choice, Delta, Listener, Outcome, run_choice
from gateway.job import Job, together
from gateway.limits import ClientGone
from gateway.responses import json_response
from gateway.services import Services
from gateway.settings import StreamSettings
from gateway.sse import DONE, EventStream, encode_event
from registry.function import FunctionVersion

_log = logging.getLogger("hypercast.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """All that a generation needs to run."""

    exchange: Exchange
    version: FunctionVersion
    assets: ModelAssets
    choices: Sequence[Choice]
    format: Format
    include_usage: bool


class WholeReply:
    """Collects all choices and answers once."""

    def __init__(self, services: Services, plan: GenerationPlan) -> None:
        self._services = services
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._plan
        outcomes = [Outcome() for _ in plan.choices]
        listener = Listener(stage=_ignore, assigned=_ignore, delta=_Collector(outcomes).add)
        async with Attended(receive) as attended:
            async with Job(self._services, plan.exchange, plan.version) as job:
                await together(plan.choices, lambda choice: run_choice(job, plan.assets, choice, listener))
                usage = usage_json(prompt_tokens(job.runs), completion_tokens(job.runs))
                body = plan.format.whole(outcomes, usage)
                await job.settle()
            attended.finish()
            await json_response(body, headers=job.headers(final=True))(scope, receive, send)


class StreamReply:
    """Sends text as it comes."""

    def __init__(self, services: Services, plan: GenerationPlan) -> None:
        self._services = services
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan, settings = self._plan, self._services.settings.streams
        stream = EventStream(send, settings.write_timeout_s)
        job = Job(self._services, plan.exchange, plan.version)
        teller = StageTeller(stream, job, settings)
        try:
            async with Attended(receive, tick=teller.tick, tick_in_s=settings.head_wait_s) as attended:
                async with job:
                    writer = _ChoiceWriter(stream, plan, job)
                    listener = Listener(stage=teller.stage, assigned=teller.assigned, delta=writer.delta)
                    await together(
                        plan.choices, lambda choice: run_choice(job, plan.assets, choice, listener)
                    )
                    await job.settle()
                attended.finish()
                await stream.end(writer.tail())
        except ClientGone:
            raise
        except Exception as error:  # an event, once the stream has begun
            await fail_stream(stream, error, plan.exchange)


_LOADING = frozenset({"reserve", "fetch", "copy", "bind", "ready"})


class StageTeller:
    """The stream's head and the comments while the request is held.

    The head waits for the assignment, so that it can name the start kind, but not for longer than
    `head_wait_s`; after that, comments tell.
    """

    def __init__(self, stream: EventStream, job: Job, settings: StreamSettings) -> None:
        self._stream = stream
        self._job = job
        self._settings = settings
        self._latest = Stage(stage="queue", fraction=0.0)
        self._told = ""
        self._loaded = 0.0

    async def tick(self) -> float:
        """Called when the head has waited long enough, then for keepalives."""
        stream, settings = self._stream, self._settings
        if stream.ended:
            return settings.keepalive_s
        if not stream.started:
            await stream.start(self._job.headers(final=False))
            await self._tell(self._latest)
        elif stream.quiet_s >= settings.keepalive_s:
            await stream.comment("keepalive")
        return max(0.01, settings.keepalive_s - stream.quiet_s)

    async def stage(self, event: Stage) -> None:
        moved = event.stage != self._latest.stage
        self._latest = event
        if self._stream.started and (moved or self._stream.quiet_s >= self._settings.stage_every_s):
            await self._tell(event)

    async def assigned(self, event: Assigned) -> None:
        if self._job.assigned is not event:
            return  # a further call of the same request
        if not self._stream.started:
            await self._stream.start(self._job.headers(final=False))
            return
        await self._stream.comment(f"start-kind={event.start_kind}")
        await self._stream.comment(f"server-timing={self._job.timing(final=False)}")

    async def _tell(self, event: Stage) -> None:
        if event.stage in _LOADING:
            # To the caller the phases of a start are one load, which never goes back.
            self._loaded = max(self._loaded, event.fraction)
            text = f"stage=load {self._loaded:.0%}"
        else:
            text = f"stage={event.stage} {event.fraction:.0%}"
        if text != self._told:
            self._told = text
            await self._stream.comment(text)


class _Collector:
    def __init__(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes

    async def add(self, delta: Delta) -> None:
        self._outcomes[delta.index].add(delta)


class _ChoiceWriter:
    """Writes deltas; keeps the end of the last choice for after the bill."""

    def __init__(self, stream: EventStream, plan: GenerationPlan, job: Job) -> None:
        self._stream = stream
        self._plan = plan
        self._job = job
        self._opened: set[int] = set()
        self._open = len(plan.choices)
        self._last = (0, "")

    async def delta(self, delta: Delta) -> None:
        form = self._plan.format
        first = delta.index not in self._opened
        if first:
            self._opened.add(delta.index)
            if (opening := form.opening(delta.index)) is not None:
                await self._stream.event(opening)
                first = False
        if (chunk := form.delta(delta, first=first)) is not None:
            await self._stream.event(chunk)
        if delta.finish_reason:
            self._open -= 1
            if self._open:
                await self._stream.event(form.finish(delta.index, delta.finish_reason, None))
            else:
                self._last = (delta.index, delta.finish_reason)

    def tail(self) -> bytes:
        """All that comes after the bill, in one write."""
        form, job = self._plan.format, self._job
        facts = job.facts()
        if not self._plan.include_usage:
            return encode_event(form.finish(*self._last, facts)) + DONE
        usage = usage_json(prompt_tokens(job.runs), completion_tokens(job.runs))
        return encode_event(form.finish(*self._last, None)) + encode_event(form.usage(usage, facts)) + DONE


async def _ignore(_: object) -> None:
    return None


async def fail_stream(stream: EventStream, error: Exception, exchange: Exchange) -> None:
    """After the first byte a failure is an event; before it, the middleware's to answer."""
    if not stream.started:
        raise error
    known = translate(error)
    if known is None:
        _log.error("request %s failed", exchange.request_id, exc_info=error)
        known = ApiError(500, "internal", "the gateway failed")
    exchange.error_code = known.code
    async with asyncio.timeout(5):
        await stream.end(encode_event(known.envelope()))
