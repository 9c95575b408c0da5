"""The client of the trace experiment against a server that answers when the test lets it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from benchmarks.harness.admin_client import USAGE_SUMS
from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.open_loop import PromptPool, Replay
from benchmarks.harness.processor import ProcessorTimes
from benchmarks.harness.traces import TraceRequest
from benchmarks.trace.client import SendTrace, send

SLOW_S = 0.05


@asynccontextmanager
async def completions(gate: asyncio.Event) -> AsyncIterator[str]:
    """Serve completions of two tokens, each from when the gate is open."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        asked = json.loads(await reader.readexactly(length))
        await gate.wait()
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 2}
        last = json.dumps({"usage": usage, "hypercast": {"x_start_kind": "hot"}})
        body = "".join(f"data: {one}\n\n" for one in ("{}", "{}", last, "[DONE]"))
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def opened() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


async def test_latencies_count_from_the_scheduled_time_of_a_request() -> None:
    async with completions(opened()) as url:
        replay = Replay(
            run="r",
            target=HttpEndpoint.of(url, "key"),
            functions=["f"],
            arrivals=[TraceRequest(0.0, 3, 2), TraceRequest(0.0, 3, 2)],
            speedup=1.0,
            prompts=PromptPool.of(50, 3),
        )
        asyncio.get_running_loop().call_soon(time.sleep, SLOW_S)
        await replay.go(asyncio.Event())
    first, second = sorted(replay.finished, key=lambda done: done.request_id)
    assert (first.failure, second.failure) == ("", "")
    # Both were due at once, while the client was busy.
    assert first.late_s >= SLOW_S and second.late_s >= SLOW_S
    assert second.ttft_s >= SLOW_S and replay.late_s == [done.late_s for done in replay.finished]


class LedgerOfAnswers:
    """A platform's reports in which each request has the record that its answer should have.

    It keeps the window of which the accelerator time was requested.
    """

    def __init__(self) -> None:
        self.window: tuple[float, float] | None = None
        self._records: dict[str, dict[str, Any]] = {}

    async def usage_record(self, request_id: str) -> dict[str, Any]:
        record = {"status": "ok", "prompt_tokens": 3, "completion_tokens": 2, "ended_at": 1.0}
        return self._records.setdefault(request_id, {**dict.fromkeys(USAGE_SUMS, 1), **record})

    async def usage_sums(self, since: float, until: float) -> dict[str, int]:
        records = self._records.values()
        return {name: sum(record[name] for record in records) for name in USAGE_SUMS}

    async def reconciliation(self, functions: Sequence[str], wait_s: float) -> str:
        return "exact"

    async def gpu_time(self, since: float, until: float) -> dict[str, int]:
        self.window = since, until
        return {"allocated_ms": 1000, "loading_ms": 0, "used_ms": 0}


def order(arrivals: Sequence[tuple[float, int, int, int]], window_s: float, functions: int = 1) -> SendTrace:
    names = [f"f{place}" for place in range(functions)]
    return SendTrace(functions=names, arrivals=list(arrivals), vocabulary=50, window_s=window_s)


async def test_the_window_ends_when_it_is_due_and_not_with_the_last_answer() -> None:
    gate, reads, reports = asyncio.Event(), list[bool](), LedgerOfAnswers()

    def read() -> ProcessorTimes:
        reads.append(gate.is_set())
        if len(reads) == 2:
            asyncio.get_running_loop().call_later(0.1, gate.set)  # answers come after the window
        return ProcessorTimes(busy_s=float(len(reads)), idle_s=0.0, stolen_s=0.0)

    async with completions(gate) as url:
        trace = order([(0.0, 3, 2, 0), (0.05, 3, 2, 0)], window_s=0.06)
        sent = await send(url, "key", trace, connect=lambda *_: nullcontext(reports), processors=read)
    assert sent.ended_s == 0.06 and all(one.last_s > 0.06 for one in sent.answers)
    assert reports.window is not None and sent.ledger_ok
    assert reports.window[1] - reports.window[0] == pytest.approx(0.06, abs=1e-6)
    # The processors were read at the start and when the last request was due, not at the last answer.
    assert reads == [False, False]
