"""Replays: traces in every format, cut to a context, against the running platform, with an exact ledger."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.admin_client import key_id
from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.open_loop import PromptPool
from benchmarks.harness.percentile import percentile
from benchmarks.harness.stream_client import StreamResult, parse_tail, stream_completion
from benchmarks.harness.traces import InvalidTrace, TraceRequest, read_trace, trim_to_context
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import ROOT, Platform

PLAIN = "seconds,prompt_tokens,output_tokens\n10,5,3\n10.5,2000,2\n12.25,0,1\n"
DATA = ROOT / "benchmarks" / "data"


def test_every_format_reads_the_same(tmp_path: Path) -> None:
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.5000000,5,3\r\n"
        "2023-11-16 18:15:48.7500000,0,1\r\n2023-11-16 18:15:47,2000,2\r\n"
    )
    compact = "offset_ms,prompt_tokens,output_tokens\n0,5,3\n500,2000,2\n2250,0,1\n"
    expected = [TraceRequest(0.0, 5, 3), TraceRequest(0.5, 2000, 2), TraceRequest(2.25, 0, 1)]
    for text in (PLAIN, azure, compact):
        for content in (text.encode(), gzip.compress(text.encode())):
            (tmp_path / "trace").write_bytes(content)
            found = read_trace(tmp_path / "trace")
            assert [(round(a.offset_s, 6), a.prompt_tokens, a.output_tokens) for a in found] == [
                (a.offset_s, a.prompt_tokens, a.output_tokens) for a in expected
            ]
    cut = trim_to_context(expected, 100)
    assert cut.arrivals == (TraceRequest(0.0, 5, 3), TraceRequest(0.5, 98, 2), TraceRequest(2.25, 1, 1))
    assert (cut.prompts_capped, cut.outputs_capped) == (1, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "columns"),
        ("a,b,c\n1,2,3\n", "columns"),
        ("seconds,prompt_tokens,output_tokens\n", "no requests"),
        ("seconds,prompt_tokens,output_tokens\n0,1,1\n1,x,2\n", "line 3"),
        ("seconds,prompt_tokens,output_tokens\n0,1\n", "line 2"),
        ("seconds,prompt_tokens,output_tokens\nnan,1,1\n", "line 2"),
        ("seconds,prompt_tokens,output_tokens\n0,-1,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2"),
    ],
)
def test_a_bad_trace_says_where(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(InvalidTrace, match=words):
        read_trace(tmp_path / "trace")


@pytest.mark.parametrize(
    ("name", "requests", "seconds", "first"),
    [
        ("conv", 19_366, 3501.722, TraceRequest(0.0, 374, 44)),
        ("code", 8819, 3435.948, TraceRequest(0.0, 4808, 10)),
    ],
)
def test_the_traces_that_come_along_are_whole(
    name: str, requests: int, seconds: float, first: TraceRequest
) -> None:
    found = read_trace(DATA / f"azure-llm-2023-{name}.csv.gz")
    assert (len(found), found[-1].offset_s, found[0]) == (requests, seconds, first)


def test_prompts_are_the_same_each_time_and_as_long_as_asked() -> None:
    body = json.loads(PromptPool.of(50, 20).body("f", 3, TraceRequest(0.0, 20, 7)))
    assert body == json.loads(PromptPool.of(50, 20).body("f", 3, TraceRequest(0.0, 20, 7)))
    assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (20, 7, True)
    assert max(body["prompt"]) < 50
    assert percentile([], 50) is None
    assert (percentile([3, 1, 2], 50), percentile([3, 1, 2], 99)) == (2, 3)


@pytest.mark.parametrize(
    ("status", "tail", "failure"),
    [
        (503, b'{"error":{"code":"overloaded"}}', "503 overloaded"),
        (500, b"<html>", "500 unknown"),
        (200, b'data: {"choices":[]}\n\ndata: {"error":{"code":"timeout"}}\n\n', "stream timeout"),
        (200, b"", "stream without events"),
        (200, b"data: [DONE]\n\n", "stream without usage"),
    ],
)
def test_the_end_of_a_stream_tells_what_failed(status: int, tail: bytes, failure: str) -> None:
    assert parse_tail(StreamResult(request_id="r", status=status), tail) == failure


def test_the_id_of_a_key_is_found_whatever_its_secret_holds() -> None:
    assert key_id("hc_24c9bc3c350ce162_a_b-c_") == "24c9bc3c350ce162"


def test_nobody_there_is_a_failure_of_the_request() -> None:
    target = HttpEndpoint.of("http://127.0.0.1:9", "")
    done = asyncio.run(stream_completion(target, "r", b"{}", 5.0))
    assert done.failure.startswith("connection")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Yield a platform which has no other functions, whose instances the usage check would wait for."""
    made = Platform(data=tmp_path_factory.mktemp("replay"), flags=("--nodes", "1"))
    made.up()
    yield made
    made.down()


def replay(platform: Platform, trace: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks.replay",
            "--trace",
            str(trace),
            "--function",
            "replayed",
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, **platform.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_replay_on_the_platform(platform: Platform, tmp_path: Path) -> None:
    platform.run("deploy", "functions/tiny-coder", "--name", "replayed")
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{index * 0.4:.1f},{7 * index if index else 2000},{3 + index}\n" for index in range(8))
    trace.write_text(f"seconds,prompt_tokens,output_tokens\n{rows}")
    written, plotted = tmp_path / "out" / "replay.json", tmp_path / "out" / "replay.png"
    options = ("--speedup", "4", "--seconds", "4")
    ran = replay(platform, trace, *options, "--json", str(written), "--plot", str(plotted))
    out, err = ran.communicate(timeout=PATIENCE_S)
    assert ran.returncode == 0, out + err
    (row,) = json.loads(written.read_text())
    assert (row["requests"], row["failed"], row["prompts_capped"], row["ledger_ok"]) == (8, 0, 1, True)
    assert row["ledger"]["records"] == 8 and row["ledger"]["reconciliation"] == "exact"
    assert sum(row["start_kinds"].values()) == 8 and set(row["start_kinds"]) != {"hot"}
    assert 0 < row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
    assert row["tpot_p50_s"] > 0 and row["params"]["context_length"] == 1024
    assert plotted.read_bytes().startswith(b"\x89PNG")

    # Another trace that would last for minutes, and is left.
    trace.write_text("seconds,prompt_tokens,output_tokens\n0,5,2\n500,5,2\n")
    ran = replay(platform, trace, "--json", str(written))
    platform.until(
        "its first request is billed",
        lambda: (
            platform.get("/admin/usage/report?function=replayed")["rows"][0]["requests"] > 8
            or ran.poll() is not None
        ),
    )
    ran.send_signal(signal.SIGINT)
    out, err = ran.communicate(timeout=PATIENCE_S)
    assert ran.returncode == 130, out + err
    (row,) = json.loads(written.read_text())
    assert (row["interrupted"], row["requests"], row["ledger_ok"]) == (True, 1, None)
