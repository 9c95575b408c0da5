"""The spans of a request on the node that runs it, made of its replies.

| span | from | to |
|---|---|---|
| `generate`, `compute`, `invoke`, `forward` | its arrival at the node | its last reply |
| `prefill` | its first step | its first token |
| `decode` | its first token | its last one |
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from registry.clock import Clock
from registry.logs.context import LogContext, log_context
from registry.messages.forward import ForwardedChunk, ForwardRequest
from registry.messages.node import (
    Compute,
    Generate,
    HandlerChunk,
    InvokeHandler,
    Reply,
    RequestUsage,
    Tokens,
)
from registry.tracing.context import SpanContext, parse_message
from registry.tracing.span import AttributeValue, SpanKind, SpanRecord, Tracer

Work = Generate | Compute | InvokeHandler | ForwardRequest

_NAMES: dict[type, str] = {
    Generate: "generate",
    Compute: "compute",
    InvokeHandler: "invoke",
    ForwardRequest: "forward",
}


@dataclass(slots=True)
class _Replies:
    """What the replies to a request have shown so far; times by the monotonic clock."""

    first_token_s: float | None = None
    last_token_s: float | None = None
    tokens: int = 0
    finish_reason: str = ""
    usage: RequestUsage | None = None
    error: str = ""
    cancelled: bool = False

    def note(self, reply: Reply, now_s: float) -> None:
        match reply:
            case Tokens(ids=ids, finish_reason=reason):
                if ids:
                    self._note_output(now_s)
                    self.tokens += len(ids)
                self.finish_reason = reason or self.finish_reason
            case ForwardedChunk(data=data, completion_tokens=tokens):
                if data:
                    self._note_output(now_s)
                self.tokens = tokens
            case RequestUsage():
                self.usage = reply
            case HandlerChunk(usage=RequestUsage() as usage):
                self.usage = usage

    def _note_output(self, now_s: float) -> None:
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s


async def traced(
    replies: AsyncGenerator[Reply, None],
    request: Work,
    place: SpanContext,
    parent: SpanContext,
    tracer: Tracer,
    clock: Clock,
) -> AsyncGenerator[Reply, None]:
    """Pass on the replies to a request, and record its spans at their end; `place` is that of its own."""
    started_at, started_s, seen = clock.wall_s(), clock.monotonic_s(), _Replies()
    try:
        async with aclosing(replies):
            async for reply in replies:
                seen.note(reply, clock.monotonic_s())
                yield reply
    except (asyncio.CancelledError, GeneratorExit):
        seen.cancelled = True
        raise
    except Exception as error:
        seen.error = str(getattr(error, "code", "")) or type(error).__name__
        raise
    finally:
        times = _Times(started_at=started_at, started_s=started_s, ended_s=clock.monotonic_s())
        for span in _spans(request, seen, times, place, parent):
            tracer.record(span)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """When a request came (Unix time, and by the monotonic clock) and ended."""

    started_at: float
    started_s: float
    ended_s: float

    def at(self, moment_s: float) -> float:
        """Return the Unix time of a reading of the monotonic clock."""
        return self.started_at + (moment_s - self.started_s)


def _spans(
    request: Work, seen: _Replies, times: _Times, place: SpanContext, parent: SpanContext
) -> Iterator[SpanRecord]:
    yield SpanRecord(
        name=_NAMES[type(request)],
        context=place,
        parent=parent,
        kind=SpanKind.SERVER,
        started_at=times.started_at,
        ended_at=times.at(times.ended_s),
        attributes=_attributes(request, seen),
        error=seen.error,
    )
    first_s, last_s = seen.first_token_s, seen.last_token_s
    if not isinstance(request, Generate | ForwardRequest) or first_s is None or last_s is None:
        return
    usage = seen.usage
    stepped_s = times.started_s if usage is None else times.ended_s - usage.exec_us / 1e6
    began_s = min(max(times.started_s, stepped_s), first_s)
    for name, since_s, until_s in (("prefill", began_s, first_s), ("decode", first_s, last_s)):
        if name == "decode" and until_s <= since_s:
            return  # all of it came at once
        yield SpanRecord(
            name=name,
            context=place.child(),
            parent=place,
            started_at=times.at(since_s),
            ended_at=times.at(until_s),
        )


def _attributes(request: Work, seen: _Replies) -> dict[str, AttributeValue]:
    usage = seen.usage
    attributes: dict[str, AttributeValue] = {
        "hypercast.call_id": request.request_id,
        "hypercast.instance": request.instance_id,
    }
    if isinstance(request, Generate):
        attributes["gen_ai.usage.input_tokens"] = len(request.prompt_ids)
        attributes["hypercast.resumed_tokens"] = len(request.generated_ids)
        if request.pipeline:
            attributes["hypercast.pipeline"] = request.pipeline
    elif usage is not None and usage.prompt_tokens:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
    if isinstance(request, Generate | ForwardRequest):
        attributes["gen_ai.usage.output_tokens"] = seen.tokens
    if seen.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = [seen.finish_reason]
    if usage is not None:
        attributes["hypercast.gpu_us"], attributes["hypercast.exec_us"] = usage.gpu_us, usage.exec_us
    if seen.cancelled:
        attributes["hypercast.cancelled"] = True
    if seen.error:
        attributes["error.type"] = seen.error
    return attributes


def name_in_logs(request: Work) -> None:
    """Have the log lines of this task, and of those that it starts, name the request and its trace."""
    trace = parse_message(request.trace)
    log_context.set(LogContext(request.request_id, "" if trace is None else trace.trace_name))


def with_trace(request: Work, place: SpanContext) -> Work:
    """Return the request with the place of its span here, which its stages continue."""
    return msgspec.structs.replace(request, trace=place.message())
