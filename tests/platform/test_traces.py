"""Traces as a collector gets them of a whole platform, and its logs: JSON lines in files that are rotated."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from registry.tracing.context import named_trace
from tests.fixtures.otlp import OtlpReceiver, otlp_receiver
from tests.fixtures.platform import Platform

MODEL = "coder"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


@pytest.fixture(scope="module")
def traced(
    tmp_path_factory: pytest.TempPathFactory, root: Path, receiver: OtlpReceiver
) -> Iterator[Platform]:
    """Two nodes on two hosts, which trace what callers trace, at once."""
    made = Platform(
        data=tmp_path_factory.mktemp("traced") / "data",
        flags=(
            *("--nodes", "2", "--hosts", "2", "--keep-hot", "0s", "--log-format", "json"),
            *("--otlp-endpoint", receiver.endpoint, "--trace-sample", "0"),
            *("--log-size", "20KB", "--log-files", "2"),
        ),
        env={"OTEL_BSP_SCHEDULE_DELAY": "100"},
    )
    made.up()
    try:
        model = str(root / "functions" / "tiny-coder" / "model")
        limits = ("--max-instances", "2", "--keep-alive", "10m", "--live", "off")
        made.run("deploy", model, "--name", MODEL, *limits)
        yield made
    finally:
        made.down()


def ask(traced: Platform, **headers: str) -> dict[str, str]:
    with traced.http() as http:
        answer = http.post("/v1/completions", json=BODY, headers=headers).raise_for_status()
    return dict(answer.headers)


def test_a_trace_shows_the_start_and_the_run_of_a_request(traced: Platform, receiver: OtlpReceiver) -> None:
    headers = ask(traced, traceparent=PARENT, tracestate="vendor=1")
    assert headers["x-start-kind"] != "hot" and headers["traceresponse"].startswith(f"00-{TRACE}-")
    call = f"text_completion {MODEL}"
    names = ("POST /v1/completions", call, "place", "fetch", "bind", "queue", "generate", "prefill", "decode")
    spans = {span.name: span for span in receiver.trace(TRACE, *names)}
    parents = {name: spans[name].parent_id for name in names}
    ids = {name: spans[name].span_id for name in names}
    assert parents["POST /v1/completions"] == "b7ad6b7169203331"
    assert parents[call] == ids["POST /v1/completions"]
    assert {parents[name] for name in ("place", "fetch", "bind", "queue", "generate")} == {ids[call]}
    assert parents["prefill"] == parents["decode"] == ids["generate"]
    at_node = {name for name, span in spans.items() if span.service == "hypercast-node"}
    assert at_node == {"generate", "prefill", "decode"}
    order = ("place", "fetch", "bind", "queue", "prefill", "decode")
    starts = [spans[name].start_ns for name in order]
    assert starts == sorted(starts)
    assert {span.state for span in spans.values()} == {"vendor=1"}
    assert spans["generate"].instance in {"node-0", "node-1"}
    assert spans[call].attributes["gen_ai.usage.output_tokens"] == 8
    # The start has a trace of its own, by the node.
    ((start_trace, start_id),) = spans["place"].links
    start = {span.name: span for span in receiver.trace(start_trace, f"start {MODEL}", "fetch", "bind")}
    assert start[f"start {MODEL}"].span_id == start_id
    assert {span.service for span in start.values()} == {"hypercast-node"}


def test_each_cast_has_a_trace_with_the_parts_of_its_nodes(traced: Platform, receiver: OtlpReceiver) -> None:
    traced.run("scale", MODEL, "--instances", "2")
    casts: list[dict[str, Any]] = traced.until("a cast", lambda: traced.get("/admin/casts")["casts"])
    for cast in casts:
        trace = named_trace("cast", cast["cast_id"])
        spans = receiver.trace(trace.trace_name, f"cast {MODEL}", "cast part")
        (whole,) = [span for span in spans if span.name == f"cast {MODEL}"]
        assert whole.service == "hypercast-gateway" and not whole.failed
        for part in (span for span in spans if span.name == "cast part"):
            assert part.service == "hypercast-node" and part.parent_id == whole.span_id


def test_what_callers_do_not_trace_is_not(traced: Platform, receiver: OtlpReceiver) -> None:
    assert "traceresponse" not in ask(traced)
    assert "traceresponse" not in ask(traced, traceparent=PARENT[:-1] + "0")
    assert not receiver.spans(name="POST /v1/completions", parent_id="")


def lines_of(traced: Platform, name: str) -> list[dict[str, Any]]:
    files = [
        *sorted((traced.data / "logs").glob(f"{name}.log.*"), reverse=True),
        traced.data / "logs" / f"{name}.log",
    ]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_the_logs_are_json_with_the_ids_of_requests(traced: Platform) -> None:
    with traced.http() as http:
        answer = http.post("/v1/completions", json=BODY, headers={"traceparent": PARENT}).raise_for_status()
    own = answer.headers["x-request-id"]

    def line() -> dict[str, Any] | None:
        return next((one for one in lines_of(traced, "gateway") if one.get("request_id") == own), None)

    found = traced.until("its line in the access log", line)
    assert (found["trace_id"], found["status"], found["function"]) == (TRACE, 200, MODEL)
    assert found["process"] == "gateway" and found["logger"] == "hypercast.access"
    for node in ("node-0", "node-1"):
        lines = lines_of(traced, node)
        assert lines and {one["process"] for one in lines} == {node}
        assert all({"time", "level", "logger", "message"} <= one.keys() for one in lines)


def test_logs_that_have_grown_are_rotated_while_requests_run(traced: Platform) -> None:
    logs = traced.data / "logs"
    with traced.http() as http:

        def rotated() -> bool:
            http.get("/v1/models").raise_for_status()
            return (logs / "gateway.log.2").exists()

        traced.until("the gateway's log is rotated twice", rotated)
    assert (logs / "gateway.log.1").stat().st_size >= 20_000
    assert not (logs / "gateway.log.3").exists()
    assert ask(traced)["x-start-kind"] == "hot"
