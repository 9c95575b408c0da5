"""The client of the trace experiment against a server that answers when the test lets it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import pytest

from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.ledger_check import LedgerComparison
from benchmarks.harness.open_loop import PromptPool, Replay
from benchmarks.harness.processor import ProcessorTimes
from benchmarks.harness.traces import TraceRequest
from benchmarks.trace import client
from benchmarks.trace.client import SendTrace, send

EXACT = LedgerComparison(
    records=1, missing=0, wrong_tokens=0, wrong_status=0, sums_equal=True, conservation="exact"
)
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


class FakeAdmin:
    """Records the window of which the accelerator time was asked."""

    def __init__(self) -> None:
        self.window: tuple[float, float] | None = None
        self.scaled: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def scale(self, name: str, instances: int, *, wait: bool) -> None:
        assert (instances, wait) == (0, True)
        self.scaled.append(name)

    async def gpu_time(self, since: float, until: float) -> dict[str, int]:
        self.window = since, until
        return {"allocated_ms": 1000, "loading_ms": 0, "used_ms": 0}


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """Replace the admin interface, and the comparison with the ledger."""
    fake = FakeAdmin()

    async def exact(*_: object, **__: object) -> LedgerComparison:
        return EXACT

    monkeypatch.setattr(client.AdminClient, "connect", lambda url, key: fake)
    monkeypatch.setattr(client, "compare_ledger", exact)
    return fake


def order(arrivals: Sequence[tuple[float, int, int, int]], window_s: float, functions: int = 1) -> SendTrace:
    names = [f"f{place}" for place in range(functions)]
    return SendTrace(functions=names, arrivals=list(arrivals), vocabulary=50, window_s=window_s)


async def test_the_window_ends_when_it_is_due_and_not_with_the_last_answer(
    admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reads = asyncio.Event(), []

    def read() -> ProcessorTimes:
        reads.append(gate.is_set())
        if len(reads) == 2:
            asyncio.get_running_loop().call_later(0.1, gate.set)  # answers come after the window
        return ProcessorTimes(busy_s=float(len(reads)), idle_s=0.0, stolen_s=0.0)

    monkeypatch.setattr(client, "read_times", read)
    async with completions(gate) as url:
        sent = await send(url, "key", order([(0.0, 3, 2, 0), (0.05, 3, 2, 0)], window_s=0.06))
    assert sent.ended_s == 0.06 and all(one.last_s > 0.06 for one in sent.answers)
    assert admin.window is not None
    assert admin.window[1] - admin.window[0] == pytest.approx(0.06, abs=1e-6)
    # The processors were read at the start and when the last request was due, not at the last answer.
    assert reads == [False, False]
