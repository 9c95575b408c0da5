"""The spans of a node: of its calls, starts and parts in casts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest

from invoker.traces.calls import name_in_logs
from invoker.traces.node import NodeTracing
from invoker.traces.stages import StageSpans
from invoker.traces.starts import StartSpans
from registry.clock import FakeClock
from registry.errors import RemoteError
from registry.logs.context import LogContext, log_context
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest
from registry.messages.node import (
    Compute,
    Generate,
    HandlerChunk,
    InvokeHandler,
    Reply,
    RequestUsage,
    Tokens,
)
from registry.messages.trace import TraceContext
from registry.records.cast import CastProgress, CastState
from registry.records.instance import InstanceRecord, InstanceState
from registry.tracing.context import SpanContext, named_trace, parse_message
from registry.tracing.span import RecordedSpans, SpanKind, SpanRecord
from tests.fixtures.invoker import generate, make_image, start_request
from tests.fixtures.registry_records import cast_progress, instance

GATEWAY = SpanContext(0xABC, 0xDEF, "vendor=1")
Step = tuple[float, Reply]


class Traced:
    """A node whose requests get these replies, each after a pause in seconds."""

    def __init__(self, *steps: Step, failure: Exception | None = None) -> None:
        self.clock, self.tracer = FakeClock(wall_s=100.0), RecordedSpans()
        self.tracing = NodeTracing(self.tracer, self.clock)
        self.got: list[object] = []
        self.closed = False
        self._steps = steps
        self._failure = failure

    async def _run(self, request: object) -> AsyncGenerator[Reply, None]:
        self.got.append(request)
        try:
            for pause_s, reply in self._steps:
                self.clock.advance(pause_s)
                yield reply
            if self._failure is not None:
                raise self._failure
        finally:
            self.closed = True

    async def replies(self, request: object, count: int | None = None) -> list[Reply]:
        replies: list[Reply] = []
        async with aclosing(self.tracing.call(request, self._run)) as stream:  # type: ignore[arg-type]
            async for reply in stream:
                replies.append(reply)
                if len(replies) == count:
                    break
        return replies

    def spans(self) -> dict[str, SpanRecord]:
        return {span.name: span for span in self.tracer.spans}


def of(request: object, trace: TraceContext | None = GATEWAY.message()) -> object:  # noqa: B008
    return msgspec.structs.replace(request, trace=trace)  # type: ignore[type-var]


USAGE = RequestUsage(prompt_tokens=3, completion_tokens=3, gpu_us=900, exec_us=3_000_000)
TOKENS: tuple[Step, ...] = (
    (2.0, Tokens(ids=(1,))),
    (1.0, Tokens(ids=(2,))),
    (1.0, Tokens(ids=(3,), finish_reason="stop")),
    (0.0, USAGE),
)


async def test_a_generation_has_its_prefill_from_its_first_step_and_its_decode() -> None:
    node = Traced(*TOKENS)
    assert len(await node.replies(of(generate("i1")))) == 4
    spans = node.spans()
    own, prefill, decode = spans["generate"], spans["prefill"], spans["decode"]
    assert (own.kind, own.parent, own.context.state) == (SpanKind.SERVER, GATEWAY, "vendor=1")
    assert (own.started_at, own.ended_at) == (100.0, 104.0)
    # It waited a second for the accelerator: three seconds of execution.
    assert (prefill.started_at, prefill.ended_at) == (101.0, 102.0)
    assert (decode.started_at, decode.ended_at) == (102.0, 104.0)
    assert {prefill.parent, decode.parent} == {own.context}
    assert own.attributes["gen_ai.usage.output_tokens"] == 3
    assert own.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert own.attributes["hypercast.gpu_us"] == 900
    # What runs it continues at the node's own span.
    (request,) = node.got
    assert isinstance(request, Generate) and parse_message(request.trace) == own.context


async def test_a_generation_of_one_message_has_no_decode() -> None:
    node = Traced((2.0, Tokens(ids=(1, 2), finish_reason="length")), (0.0, USAGE))
    await node.replies(of(generate("i1")))
    assert node.spans().keys() == {"generate", "prefill"}


@pytest.mark.parametrize("trace", [None, TraceContext("nonsense"), TraceContext(GATEWAY.header[:-1] + "0")])
async def test_a_request_without_a_recorded_trace_is_run_as_it_is(trace: TraceContext | None) -> None:
    node = Traced(*TOKENS)
    request = of(generate("i1"), trace)
    await node.replies(request)
    assert node.got == [request] and node.tracer.spans == []


async def test_other_work_has_one_span() -> None:
    work = {
        "compute": Compute(request_id="r", instance_id="i", kind="embed"),
        "invoke": InvokeHandler(request_id="r", instance_id="i", body=b"{}"),
    }
    for name, request in work.items():
        node = Traced((1.0, HandlerChunk(data=b"1", usage=USAGE)))
        await node.replies(of(request))
        (span,) = node.tracer.spans
        assert (span.name, span.ended_at, span.attributes["hypercast.exec_us"]) == (name, 101.0, 3_000_000)


async def test_what_passes_through_to_another_server_is_split_where_it_streams() -> None:
    request = ForwardRequest(request_id="r", instance_id="i", path="/v1/completions", body=b"{}")
    head = ForwardedHead(status=200, content_type="text/event-stream")
    node = Traced(
        (1.0, head),
        (1.0, ForwardedChunk(data=b"a", completion_tokens=1)),
        (2.0, ForwardedChunk(data=b"b", completion_tokens=5)),
        (0.0, ForwardedChunk(last=True, completion_tokens=5)),
        (0.0, USAGE),
    )
    await node.replies(of(request))
    spans = node.spans()
    assert spans["forward"].attributes["gen_ai.usage.output_tokens"] == 5
    assert (spans["decode"].started_at, spans["decode"].ended_at) == (102.0, 104.0)


async def test_a_failure_and_a_caller_that_leaves_are_seen() -> None:
    node = Traced((1.0, Tokens(ids=(1,))), failure=RemoteError("pipeline_lost", "n1 is lost"))
    with pytest.raises(RemoteError):
        await node.replies(of(generate("i1")))
    own = node.spans()["generate"]
    assert (own.error, own.attributes["error.type"]) == ("pipeline_lost", "pipeline_lost")
    left = Traced(*TOKENS)
    await left.replies(of(generate("i1")), count=1)
    own = left.spans()["generate"]
    assert own.error == "" and own.attributes["hypercast.cancelled"] is True and left.closed


async def test_a_cancelled_call_is_recorded_and_cancelled() -> None:
    node = Traced(*TOKENS)
    reached, never = asyncio.Event(), asyncio.Event()

    async def stuck(_: object) -> AsyncGenerator[Reply, None]:
        reached.set()
        await never.wait()
        yield USAGE

    async def read() -> None:
        async with aclosing(node.tracing.call(of(generate("i1")), stuck)) as replies:  # type: ignore[arg-type]
            async for _ in replies:
                pass

    task = asyncio.create_task(read())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (span,) = node.tracer.spans
    assert span.attributes["hypercast.cancelled"] is True


async def test_the_lines_of_a_call_name_it_and_those_of_others_do_not() -> None:
    seen: list[LogContext | None] = []

    async def run(request: object) -> None:
        name_in_logs(request)  # type: ignore[arg-type]
        seen.append(await asyncio.create_task(context()))

    async def context() -> LogContext | None:
        return log_context.get()

    await asyncio.gather(
        asyncio.create_task(run(of(generate("i1", "r1")))),
        asyncio.create_task(run(of(generate("i1", "r2"), None))),
    )
    assert seen == [LogContext("r1", GATEWAY.trace_name), LogContext("r2")]
    assert log_context.get() is None


def started(*records: InstanceRecord, cast: bool = False) -> tuple[list[SpanRecord], list[InstanceRecord]]:
    tracer, published = RecordedSpans(), list[InstanceRecord]()
    starts = StartSpans(tracer)
    publish = starts.watched(published.append)
    for record in records:
        publish(record)
    return tracer.spans, published


def at(since: float, state: InstanceState, **changes: object) -> InstanceRecord:
    return instance("i7", function="coder", state=state, since=since, **changes)


def test_a_start_has_a_trace_of_its_own_with_its_phases() -> None:
    records = [
        at(10.0, InstanceState.STARTING),
        at(10.5, InstanceState.LOADING),
        at(10.5, InstanceState.LOADING, progress=0.5),
        at(12.0, InstanceState.READY, phases_ms={"reserve": 500.0, "fetch": 1000.0, "bind": 500.0}),
        at(90.0, InstanceState.DRAINING),
        at(91.0, InstanceState.STOPPED),
    ]
    spans, published = started(*records)
    assert published == records
    own, *phases = spans
    assert (own.name, own.context, own.parent) == ("start coder", named_trace("start", "i7"), None)
    assert (own.started_at, own.ended_at, own.error) == (10.0, 12.0, "")
    assert [(one.name, one.started_at, one.ended_at) for one in phases] == [
        ("reserve", 10.0, 10.5),
        ("fetch", 10.5, 11.5),
        ("bind", 11.5, 12.0),
    ]
    assert {one.parent for one in phases} == {own.context}


def test_a_failed_start_has_the_phases_that_it_went_through() -> None:
    failed = at(11.0, InstanceState.FAILED, phases_ms={"reserve": 250.0}, error="no source has it")
    spans, _ = started(at(10.0, InstanceState.STARTING), failed)
    assert [span.name for span in spans] == ["start coder", "reserve"]
    assert (spans[0].error, spans[0].ended_at, spans[1].ended_at) == ("no source has it", 11.0, 10.25)
    stopped, _ = started(at(10.0, InstanceState.STARTING), at(11.0, InstanceState.STOPPED))
    assert stopped[0].error == "" and stopped[0].attributes["hypercast.cancelled"] is True


def test_a_start_is_linked_with_the_cast_that_brings_its_image() -> None:
    tracer = RecordedSpans()
    starts = StartSpans(tracer)
    image = make_image("a", 1000)
    starts.note_request(start_request("i7", image))  # without a cast
    plain = starts.watched(lambda _: None)
    plain(at(10.0, InstanceState.STARTING))
    plain(at(11.0, InstanceState.READY))
    assert list(tracer.spans[0].links) == []


def part(state: CastState, **changes: object) -> list[SpanRecord]:
    tracer, published = RecordedSpans(), list[CastProgress]()
    progress = cast_progress("n1", "c7", state=state, seconds=2.5, updated_at=50.0, **changes)
    StartSpans(tracer).watched_casts(published.append)(progress)
    assert published == [progress]
    return tracer.spans


def test_a_part_in_a_cast_is_in_the_trace_of_the_cast() -> None:
    assert part(CastState.RUNNING) == []
    (span,) = part(CastState.COMPLETE, received={"tcp": 900}, pulled={"n0": 900}, faults={"late": 1})
    cast = named_trace("cast", "c7")
    assert (span.name, span.parent, span.context.trace_id) == ("cast part", cast, cast.trace_id)
    assert (span.started_at, span.ended_at, span.error) == (47.5, 50.0, "")
    assert span.attributes["hypercast.received.tcp"] == 900
    assert span.attributes["hypercast.pulls.late"] == 1
    assert span.attributes["hypercast.peers"] == ["n0"]
    (failed,) = part(CastState.FAILED, error="blocks 3, 4 have no holder")
    assert failed.error == "blocks 3, 4 have no holder"


def test_a_stage_has_a_span_for_each_sequence_that_is_traced() -> None:
    clock, tracer = FakeClock(wall_s=10.0), RecordedSpans()
    spans = StageSpans(tracer, clock.wall_s, "stage", {"hypercast.stage": 1})
    spans.enter("s1", "r1", GATEWAY.message())
    spans.enter("s2", "r2", TraceContext("nonsense"))
    spans.enter("s3", "r3", None)
    for sequence in ("s1", "s2", "s3"):
        clock.advance(1.0)
        spans.add_step(sequence, 0.25)
    spans.add_step("s1", 0.25)
    for sequence in ("s1", "s2", "s3", "s1"):
        spans.release(sequence)
    (span,) = tracer.spans
    assert (span.name, span.parent, span.started_at, span.ended_at) == ("stage", GATEWAY, 10.0, 13.0)
    assert span.attributes == {
        "hypercast.stage": 1,
        "hypercast.call_id": "r1",
        "hypercast.steps": 2,
        "hypercast.busy_ms": 500.0,
    }
    assert not spans.open
