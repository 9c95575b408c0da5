"""Trace contexts, what is sampled, and spans as a collector gets them."""

import asyncio
import socket
import sys
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.config.options import Options
from registry.errors import InvalidRecord
from registry.messages.node import Generate, Request
from registry.messages.sampling import Sampling
from registry.messages.trace import TraceContext
from registry.tracing.context import (
    MAX_STATE_CHARS,
    SpanContext,
    named_trace,
    new_trace,
    parse_message,
    parse_trace,
)
from registry.tracing.otlp import OtlpTracer, open_tracer
from registry.tracing.sampling import TraceSampler
from registry.tracing.settings import TracingSettings, tracing_settings
from registry.tracing.span import SpanKind, SpanRecord, phase_spans
from tests.fixtures.otlp import otlp_receiver
from tests.fixtures.patience import PATIENCE_S

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_read_as_the_standard_says() -> None:
    caller = parse_trace(PARENT, "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7")
    assert caller is not None and caller.sampled
    assert caller.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert caller.context.span_id == 0xB7AD6B7169203331
    assert caller.context.state == "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
    unsampled = parse_trace(PARENT[:-1] + "0")
    assert unsampled is not None and not unsampled.sampled
    assert parse_trace(PARENT[:-2] + "03") == parse_trace(PARENT)  # other flags may follow
    later = parse_trace("cc" + PARENT[2:] + "-what-a-later-version-adds")
    assert later == parse_trace(PARENT)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT[:-1],
        PARENT + "-more",
        PARENT.upper(),
        "ff" + PARENT[2:],
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT.replace("-", "_"),
        " " + PARENT,
        PARENT + "\n",
    ],
)
def test_an_invalid_traceparent_counts_as_none(parent: str) -> None:
    assert parse_trace(parent) is None


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    assert parse_trace(text) is None or len(text) >= len(PARENT)
    found = parse_trace(PARENT, text)
    assert found is not None and len(found.context.state) <= MAX_STATE_CHARS


def test_what_a_message_carries_is_what_its_sender_has() -> None:
    own = SpanContext(7, 9, "a=b")
    assert parse_message(own.message()) == own
    assert parse_message(None) is None
    assert parse_message(TraceContext(PARENT[:-1] + "0")) is None  # not recorded
    assert parse_message(TraceContext("no traceparent")) is None


def test_children_are_of_the_same_trace() -> None:
    first = new_trace()
    child = first.child()
    assert child.trace_id == first.trace_id and child.span_id != first.span_id
    assert new_trace().trace_id != first.trace_id


def test_a_thing_has_the_same_trace_in_every_process() -> None:
    assert named_trace("cast", "c1") == named_trace("cast", "c1")
    others = {named_trace("cast", "c1"), named_trace("cast", "c2"), named_trace("start", "c1")}
    assert len({one.trace_id for one in others}) == 3


def test_nodes_of_an_earlier_release_read_requests_with_a_trace() -> None:
    class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):  # of a release without traces
        request_id: str
        instance_id: str
        prompt_ids: tuple[int, ...]
        sampling: Sampling

    made = _generate(trace=TraceContext(PARENT, "a=b"))
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Generate)
    assert read.prompt_ids == made.prompt_ids
    # Their own requests have none.
    sent = msgspec.msgpack.encode(read)
    assert msgspec.msgpack.decode(sent, type=Request) == _generate()


def test_a_request_without_a_trace_is_as_long_as_before() -> None:
    assert b"trace" not in msgspec.msgpack.encode(_generate())


def _generate(trace: TraceContext | None = None) -> Generate:
    sampling = Sampling(max_tokens=1)
    return Generate(request_id="r", instance_id="i", prompt_ids=(1,), sampling=sampling, trace=trace)


class _Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_share_is_sampled_and_what_its_caller_samples() -> None:
    chances = iter((0.1, 0.6))
    sampler = TraceSampler(0.5, 100, _Time(), lambda: next(chances))
    assert [sampler.takes(None), sampler.takes(None)] == [True, False]
    assert sampler.takes(True) and not sampler.takes(False)


def test_no_more_than_the_rate_is_sampled() -> None:
    time = _Time()
    sampler = TraceSampler(1.0, 10, time)
    assert sum(sampler.takes(None) for _ in range(100)) == 10
    assert not sampler.takes(True)  # its caller does not matter then
    time.now_s = 0.5
    assert sum(sampler.takes(True) for _ in range(100)) == 5
    time.now_s = 100.0
    assert sum(sampler.takes(None) for _ in range(100)) == 10


def test_a_share_of_none_leaves_the_choice_to_callers() -> None:
    sampler = TraceSampler(0.0, 10, _Time())
    assert not any(sampler.takes(None) for _ in range(100))
    assert sampler.takes(True)


def test_phases_end_where_the_start_ended_and_begin_with_the_wait() -> None:
    spans = list(
        phase_spans({"fetch": 1000.0, "copy": 500.0, "bind": 250.0}, new_trace(), 10.0, not_before=9.0)
    )
    assert [(span.name, span.started_at, span.ended_at) for span in spans] == [
        ("fetch", 9.0, 9.25),
        ("copy", 9.25, 9.75),
        ("bind", 9.75, 10.0),
    ]
    assert [span.name for span in phase_spans({"fetch": 1.0}, new_trace(), 5.0, not_before=6.0)] == []


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "ftp://collector", "http://", "http://a/?key=secret", "http://[bad"],
)
def test_a_bad_endpoint_is_refused_without_being_shown(endpoint: str) -> None:
    with pytest.raises(InvalidRecord, match="is no URL") as refused:
        tracing_settings(replace(Options(), otlp_endpoint=endpoint))
    assert "secret" not in str(refused.value)


def test_credentials_belong_into_the_environment() -> None:
    with pytest.raises(InvalidRecord, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        tracing_settings(replace(Options(), otlp_endpoint="https://me:secret@collector"))
    assert "secret" not in str(refused.value)


def test_the_endpoint_may_have_a_path_or_that_of_traces() -> None:
    for endpoint in ("https://c:4318/otel", "https://c:4318/otel/", "https://c:4318/otel/v1/traces"):
        settings = tracing_settings(replace(Options(), otlp_endpoint=endpoint))
        assert settings.url == "https://c:4318/otel/v1/traces"
    assert tracing_settings(Options()) == TracingSettings()
    assert open_tracer(TracingSettings(), "s", "i") is None


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidRecord, match=r"pip install 'hypercast\[otel\]'"):
        open_tracer(TracingSettings(url="http://127.0.0.1:9/v1/traces"), "s", "i")


async def test_a_collector_gets_what_was_recorded() -> None:
    caller, own, linked = SpanContext(1, 2, "a=b,c=d"), SpanContext(1, 3, "a=b,c=d"), named_trace("cast", "c")
    with otlp_receiver() as receiver:
        tracer = OtlpTracer(f"{receiver.endpoint}/v1/traces", "hypercast-node", "node-0")
        tracer.record(
            SpanRecord(
                name="generate",
                context=own,
                parent=caller,
                kind=SpanKind.SERVER,
                started_at=1_700_000_000.25,
                ended_at=1_700_000_001.5,
                attributes={
                    "text": "x",
                    "kind": SpanKind.CLIENT,
                    "number": 1 << 62,
                    "share": 0.5,
                    "is": True,
                },
                links=[linked],
                error="it failed",
            )
        )
        tracer.record(SpanRecord(name="first", context=linked, parent=None, started_at=5.0, ended_at=4.0))
        await tracer.aclose()
        await tracer.aclose()
        tracer.record(SpanRecord(name="late", context=linked, parent=None, started_at=5.0, ended_at=6.0))
        assert receiver.paths == {"/v1/traces"}
        (span,) = receiver.spans(name="generate")
        assert (span.service, span.instance) == ("hypercast-node", "node-0")
        assert (int(span.trace_id, 16), int(span.parent_id, 16), int(span.span_id, 16)) == (1, 2, 3)
        assert (span.start_ns, span.end_ns) == (1_700_000_000_250_000_000, 1_700_000_001_500_000_000)
        assert span.attributes == {"text": "x", "kind": "client", "number": 1 << 62, "share": 0.5, "is": True}
        assert span.links == ((linked.trace_name, f"{linked.span_id:016x}"),)
        assert (span.failed, span.error, span.state, span.kind) == (True, "it failed", "a=b,c=d", 2)
        (first,) = receiver.spans(name="first")
        assert first.parent_id == "" and first.start_ns == first.end_ns == 5_000_000_000
        assert not receiver.spans(name="late")


async def test_a_collector_that_does_not_answer_delays_no_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        tracer = OtlpTracer(url, "s", "i", close_s=0.05)
        tracer.record(SpanRecord(name="x", context=new_trace(), parent=None, started_at=1.0, ended_at=2.0))
        closing = asyncio.create_task(tracer.aclose())
        silent.setblocking(False)
        async with asyncio.timeout(PATIENCE_S):
            connection, _ = await asyncio.get_running_loop().sock_accept(silent)
            await closing  # though what it exports waits for an answer
        connection.close()
