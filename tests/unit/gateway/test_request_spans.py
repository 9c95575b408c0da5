"""The spans of a request, from what is known of it at its end."""

import importlib
from collections.abc import AsyncIterator

import pytest

from gateway.cluster.cast_tracker import CastEnded
from gateway.core.contract import Assigned, Event, FunctionCall
from gateway.core.open_call import OpenCall
from gateway.core.request_context import RequestContext
from gateway.core.request_trace import RequestTrace
from gateway.fakes.dispatcher import FakeDispatcher
from gateway.requests.spans import ServedRequest, call_spans, cast_span, request_span
from registry.messages.forward import ForwardRequest
from registry.messages.node import Compute, Generate, InvokeHandler, RequestUsage, Tokens
from registry.messages.sampling import Sampling
from registry.records.cast import CastState
from registry.tracing.context import named_trace, new_trace
from registry.tracing.span import RecordedSpans, SpanKind, SpanRecord
from tests.fixtures.registry_records import cast, draft

RECEIVED_AT = 1_700_000_000.0
SAMPLING = Sampling(max_tokens=2, temperature=0.5, top_p=0.9, top_k=40, seed=5, presence_penalty=0.25)
WORK = Generate(request_id="req-1/0", instance_id="", prompt_ids=(1, 2, 3), sampling=SAMPLING)


def trace(route: str = "/v1/chat/completions") -> RequestTrace:
    return RequestTrace(RecordedSpans(), route, new_trace(), None)


def context() -> RequestContext:
    return RequestContext(request_id="req-1", received_at=RECEIVED_AT, received_s=0.0)


def assigned(**changes: object) -> Assigned:
    values: dict[str, object] = {
        "instance_id": "coder-1-ab",
        "node": "n1",
        "gpu_type": "cpu",
        "gpu_count": 1,
        "start_kind": "cold",
        "queue_ms": 10.0,
        "load_ms": 1000.0,
        "phases_ms": {"reserve": 100.0, "fetch": 300.0, "copy": 200.0, "bind": 150.0, "ready": 50.0},
    }
    return Assigned(**{**values, **changes})  # type: ignore[arg-type]


async def ended(
    of: RequestTrace, work: object = WORK, *, assignment: Assigned | None = None, tokens: int = 2
) -> OpenCall:
    """Return a call that has ended."""

    async def script(call: FunctionCall) -> AsyncIterator[Event]:
        yield assignment or assigned()
        for number in range(tokens):
            yield Tokens(ids=(number,), finish_reason="stop" if number == tokens - 1 else "")
        yield RequestUsage(prompt_tokens=3, completion_tokens=tokens, gpu_us=700, exec_us=900)

    version = draft("coder", version=4)
    call = FunctionCall(
        request_id="req-1/0",
        tenant="acme",
        version=version,
        work=work,  # type: ignore[arg-type]
        span=of.own.child(),
    )
    async with FakeDispatcher(script=script).run(call) as run:
        async for event in run:
            if isinstance(event, RequestUsage):
                break
    return run


def named(spans: list[SpanRecord]) -> dict[str, SpanRecord]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


async def test_a_cold_call_shows_where_its_start_took_its_time() -> None:
    of = trace()
    run = await ended(of)
    spans = named(list(call_spans(run, context(), of)))
    call = spans.pop("chat coder")
    assert call.context == run.call.span and call.parent == of.own and call.kind is SpanKind.CLIENT
    begin = call.started_at
    after = {name: (span.started_at - begin, span.ended_at - begin) for name, span in spans.items()}
    expected = {
        "place": (0.0, 0.2),
        "reserve": (0.2, 0.3),
        "fetch": (0.3, 0.6),
        "copy": (0.6, 0.8),
        "bind": (0.8, 0.95),
        "ready": (0.95, 1.0),
        "queue": (1.0, 1.01),
    }
    assert after.keys() == expected.keys()
    for name, (since, until) in expected.items():
        assert after[name] == pytest.approx((since, until), abs=1e-3), name
    assert {span.parent for span in spans.values()} == {call.context}
    assert list(spans["place"].links) == [named_trace("start", "coder-1-ab")]


async def test_a_call_that_came_during_the_start_shows_the_rest_of_it() -> None:
    of = trace()
    run = await ended(of, assignment=assigned(load_ms=300.0))
    spans = named(list(call_spans(run, context(), of)))
    assert spans.keys() == {"chat coder", "copy", "bind", "ready", "queue"}
    assert spans["copy"].ended_at - spans["copy"].started_at == pytest.approx(0.1, abs=1e-3)


async def test_a_hot_call_has_only_its_queue() -> None:
    of = trace()
    run = await ended(of, assignment=assigned(load_ms=0.0, queue_ms=0.02, start_kind="hot", phases_ms={}))
    assert [span.name for span in call_spans(run, context(), of)] == ["chat coder", "queue"]


async def test_a_live_call_waits_in_place_for_its_pipeline() -> None:
    of = trace()
    run = await ended(of, assignment=assigned(start_kind="live", phases_ms={}))
    spans = named(list(call_spans(run, context(), of)))
    assert spans.keys() == {"chat coder", "place", "queue"}
    assert spans["place"].ended_at == spans["queue"].started_at


@pytest.mark.parametrize(
    ("work", "route", "name"),
    [
        (WORK, "/v1/completions", "text_completion coder"),
        (WORK, "/functions/{name}/invoke", "generate_content coder"),
        (Compute(request_id="r", instance_id="", kind="embed"), "/v1/embeddings", "embeddings coder"),
        (
            Compute(request_id="r", instance_id="", kind="classify"),
            "/functions/{name}/invoke",
            "invoke coder",
        ),
        (
            InvokeHandler(request_id="r", instance_id="", body=b"{}"),
            "/functions/{name}/invoke",
            "invoke coder",
        ),
        (
            ForwardRequest(request_id="r", instance_id="", path="/v1/chat/completions", body=b"{}"),
            "/v1/chat/completions",
            "chat coder",
        ),
    ],
)
async def test_calls_are_named_by_operation_and_model(work: object, route: str, name: str) -> None:
    of = trace(route)
    run = await ended(of, work)
    first = next(call_spans(run, context(), of))
    assert first.name == name


async def test_the_attributes_of_a_call_have_the_names_of_the_conventions() -> None:
    of = trace()
    run = await ended(of)
    attributes = next(call_spans(run, context(), of)).attributes
    known = importlib.import_module("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    published = {value for key, value in vars(known).items() if key.startswith("GEN_AI_")}
    ours = {name for name in attributes if name.startswith("gen_ai.")}
    assert ours <= published
    assert all(name.startswith(("gen_ai.", "hypercast.", "error.", "http.")) for name in attributes)
    operations = {one.value for one in known.GenAiOperationNameValues}
    assert {"chat", "text_completion", "embeddings", "generate_content"} <= operations
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "coder"
    assert attributes["gen_ai.response.model"] == "coder:4"
    assert attributes["gen_ai.request.temperature"] == 0.5 and attributes["gen_ai.request.top_k"] == 40
    assert attributes["gen_ai.request.presence_penalty"] == 0.25
    assert "gen_ai.request.frequency_penalty" not in attributes
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 2)
    assert attributes["hypercast.nodes"] == ["n1"] and attributes["hypercast.tries"] == 1
    assert attributes["gen_ai.response.time_to_first_chunk"] >= 0


async def test_a_call_of_a_request_without_a_trace_has_no_spans() -> None:
    of = trace()
    version = draft("coder", version=4)
    call = FunctionCall(request_id="r", tenant="t", version=version, work=WORK)
    run = FakeDispatcher().run(call)
    assert list(call_spans(run, context(), of)) == []


def test_a_request_is_failed_only_by_the_server() -> None:
    of, about = trace(), context()
    served = ServedRequest(method="POST", path="/v1/chat/completions", status=200, ended_at=RECEIVED_AT + 2)
    span = request_span(about, of, served)
    assert (span.name, span.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
    assert (span.started_at, span.ended_at, span.error) == (RECEIVED_AT, RECEIVED_AT + 2, "")
    about.error_code = "model_not_found"
    missing = request_span(
        about, of, ServedRequest(method="GET", path="/x", status=404, ended_at=RECEIVED_AT)
    )
    assert (missing.error, missing.attributes["error.type"]) == ("", "model_not_found")
    about.error_code = "start_failed"
    failed = request_span(about, of, ServedRequest(method="GET", path="/x", status=503, ended_at=RECEIVED_AT))
    assert (failed.error, failed.attributes["error.type"]) == ("start_failed", "start_failed")


def test_a_cast_is_the_first_span_of_its_own_trace() -> None:
    end = CastEnded(record=cast("c7"), seconds=4.0, state=CastState.FAILED)
    span = cast_span(end)
    assert span.context == named_trace("cast", "c7") and span.parent is None
    assert span.ended_at - span.started_at == pytest.approx(4.0)
    assert span.error == "the cast is failed"
