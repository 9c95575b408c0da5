"""W3C trace context in and out, and JSON lines, over real HTTP."""

import asyncio
import io
import json
import logging
from contextlib import redirect_stderr

import pytest

from registry.messages.node import Generate
from registry.tracing.context import parse_message, parse_trace
from registry.tracing.settings import TracingSettings
from registry.tracing.span import RecordedSpans, SpanRecord
from tests.fixtures.gateway_http import byte_tokenizer, gateway
from tests.fixtures.patience import until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = "0af7651916cd43dd8448eb211c80319c"
BODY = {"model": "coder", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
ALL = TracingSettings(url="http://unused", rate=1000)
BY_CALLERS = TracingSettings(url="http://unused", rate=1000, share=0.0)


def by_name(tracer: RecordedSpans) -> dict[str, SpanRecord]:
    return {span.name: span for span in tracer.spans}


async def test_a_request_continues_the_trace_of_its_caller() -> None:
    tracer = RecordedSpans()
    async with gateway(tracer=tracer, tracing=BY_CALLERS) as gw, gw.http(gw.caller_key) as http:
        await gw.add_function(tokenizer=byte_tokenizer())
        headers = {"traceparent": PARENT, "tracestate": "vendor=1", "x-request-id": "mine"}
        response = await http.post("/v1/chat/completions", json=BODY, headers=headers)
        assert response.status_code == 200, response.text
        (work,) = gw.dispatcher.works()
    assert isinstance(work, Generate)
    spans = by_name(tracer)
    own, call = spans["POST /v1/chat/completions"], spans["chat coder"]
    assert own.context.trace_name == TRACE and own.parent is not None
    assert (own.parent.span_id, own.context.state) == (0xB7AD6B7169203331, "vendor=1")
    assert own.attributes["http.response.status_code"] == 200
    assert own.attributes["hypercast.tenant"] == "acme"
    assert own.attributes["hypercast.client_request_id"] == "mine"
    assert call.parent == own.context
    # The node gets the place of the call, the client that of the request.
    assert parse_message(work.trace) == call.context
    returned = parse_trace(response.headers["traceresponse"])
    assert returned is not None and returned.context.span_id == own.context.span_id
    assert own.started_at <= call.started_at <= call.ended_at <= own.ended_at + 0.01


async def test_a_stream_is_traced_to_its_end() -> None:
    tracer = RecordedSpans()
    async with gateway(tracer=tracer, tracing=ALL) as gw, gw.http(gw.caller_key) as http:
        await gw.add_function(tokenizer=byte_tokenizer())
        async with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
            assert "traceresponse" in response.headers
            assert "data: [DONE]" in (await response.aread()).decode()
    spans = by_name(tracer)
    assert spans.keys() == {"POST /v1/chat/completions", "chat coder", "queue"}
    assert spans["POST /v1/chat/completions"].parent is None


async def test_what_is_not_sampled_leaves_no_trace() -> None:
    tracer = RecordedSpans()
    async with gateway(tracer=tracer, tracing=BY_CALLERS) as gw, gw.http(gw.caller_key) as http:
        await gw.add_function(tokenizer=byte_tokenizer())
        for parent in ("", PARENT[:-1] + "0", "no-traceparent"):
            response = await http.post("/v1/chat/completions", json=BODY, headers={"traceparent": parent})
            assert response.status_code == 200 and "traceresponse" not in response.headers
        assert [work.trace for work in gw.dispatcher.works()] == [None] * 3
    assert tracer.spans == []


async def test_without_a_tracer_a_traceparent_changes_nothing() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as http:
        await gw.add_function(tokenizer=byte_tokenizer())
        response = await http.post("/v1/chat/completions", json=BODY, headers={"traceparent": PARENT})
        assert response.status_code == 200 and "traceresponse" not in response.headers
        (work,) = gw.dispatcher.works()
        assert work.trace is None


async def test_strangers_and_probes_use_up_no_traces() -> None:
    tracer = RecordedSpans()
    settings = TracingSettings(url="http://unused", rate=1)
    async with gateway(tracer=tracer, tracing=settings) as gw:
        async with gw.http("no key") as stranger:
            for _ in range(3):
                refused = await stranger.post("/v1/chat/completions", headers={"traceparent": PARENT})
                assert refused.status_code == 401
            assert (await stranger.get("/livez", headers={"traceparent": PARENT})).status_code == 200
        async with gw.http(gw.caller_key) as http:
            missing = await http.post("/v1/nowhere", headers={"traceparent": PARENT})
            assert missing.status_code == 404
            assert tracer.spans == []
            assert (await http.get("/v1/models")).status_code == 200
    assert [span.name for span in tracer.spans] == ["GET /v1/models"]


async def test_no_more_requests_than_the_rate_are_traced() -> None:
    tracer = RecordedSpans()
    settings = TracingSettings(url="http://unused", rate=2)
    async with gateway(tracer=tracer, tracing=settings) as gw, gw.http(gw.caller_key) as http:
        answers = await asyncio.gather(*(http.get("/v1/models") for _ in range(20)))
    traced = [answer for answer in answers if "traceresponse" in answer.headers]
    assert 2 <= len(traced) == len(tracer.spans) < 20


async def test_a_failed_request_says_why() -> None:
    tracer = RecordedSpans()
    async with gateway(tracer=tracer, tracing=ALL) as gw, gw.http(gw.caller_key) as http:
        response = await http.post("/v1/chat/completions", json={**BODY, "model": "nothing"})
        assert response.status_code == 404
    (span,) = tracer.spans
    assert span.attributes["error.type"] == "model_not_found" and span.error == ""


async def test_json_lines_name_request_and_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hypercast.access")
    with redirect_stderr(io.StringIO()) as written:
        async with gateway(log_format="json", gateway_id="gw-1") as gw, gw.http(gw.caller_key) as http:
            await gw.add_function(tokenizer=byte_tokenizer())
            headers = {"traceparent": PARENT[:-1] + "0", "x-request-id": "mine"}
            response = await http.post("/v1/chat/completions", json=BODY, headers=headers)
            assert response.status_code == 200
            await until(lambda: "\n" in written.getvalue())
    found = [json.loads(line) for line in written.getvalue().splitlines()]
    called = next(line for line in found if line["path"] == "/v1/chat/completions")
    assert called["process"] == "gw-1" and called["logger"] == "hypercast.access"
    assert (called["client_request_id"], called["trace_id"]) == (
        "mine",
        TRACE,
    )  # though it is not traced here
    assert (called["status"], called["function"], called["start_kind"]) == (200, "coder", "hot")
    assert called["request_id"].startswith("req-") and called["duration_ms"] >= 0
