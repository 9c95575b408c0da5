"""Calls of a vLLM server whose answers a test writes, and of the two engines of an instance."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from invoker.engine.contract import EngineError, TokenOutput
from invoker.engine.runner import EngineRunner, NullMeter
from invoker.handlers.spawn import ProcessOutput
from invoker.vllm.arguments import VllmSpec
from invoker.vllm.client import ServerLost
from invoker.vllm.events import ServerRefused
from invoker.vllm.native_first import NativeFirst
from invoker.vllm.runner import VllmRunner
from invoker.vllm.server import VllmServer
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest
from registry.messages.trace import TraceContext
from tests.fixtures.engine import sequence
from tests.fixtures.fake_engine import FakeEngine, HeldCall, StepGate
from tests.fixtures.patience import PATIENCE_S

pytestmark = pytest.mark.anyio
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
END = b'data: {"choices":[{"token_ids":[9],"finish_reason":"length"}]}\n\n'
TOKEN = b'data: {"choices":[{"token_ids":[8],"finish_reason":null}]}\n\n'
BODY = b'{"model":"f","stream":true}'
FORWARDED = ForwardRequest(request_id="r", instance_id="i", path="/v1/completions", body=BODY)


def always(*events: bytes) -> Answer:
    """Return an answer of these events."""

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(events))

    return answer


@asynccontextmanager
async def running(
    folder: Path, answer: Answer, on_head: Callable[[bytes], None] = lambda _: None
) -> AsyncIterator[tuple[VllmRunner, VllmServer]]:
    """Run a process that stands for a server, and answer on its socket; `on_head` gets requests' heads."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        on_head(head)
        length = int(head.partition(b"content-length:")[2].split()[0])
        body = json.loads(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        await answer(body, writer)
        writer.close()

    scratch = folder / "scratch"
    scratch.mkdir()
    spec = VllmSpec(
        python=Path("/bin/true"),
        folder=folder,
        scratch=scratch,
        name="f",
        dtype="",
        context_length=0,
        max_sequences=4,
        device="cpu",
        memory_bytes=1 << 30,
    )
    output = await ProcessOutput.open()
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    os.close(output.write_end)
    listening = await asyncio.start_unix_server(serve, spec.socket)
    server = VllmServer(spec, process, output, lambda _: None, lambda: None, lambda: None)
    runner = VllmRunner(server, NullMeter())
    try:
        yield runner, server
    finally:
        await runner.aclose()
        listening.close()


async def outputs_of(runner: VllmRunner | NativeFirst, call: HeldCall) -> list[TokenOutput]:
    async with asyncio.timeout(PATIENCE_S), aclosing(runner.generate(sequence("r", [5]), call)) as outputs:
        return [output async for output in outputs]


async def replies_of(
    runner: VllmRunner | NativeFirst, call: HeldCall
) -> list[tuple[ForwardedHead | ForwardedChunk, int]]:
    """Return the replies, each with what held the call then."""
    async with (
        asyncio.timeout(PATIENCE_S),
        aclosing(runner.forward(FORWARDED, call)) as replies,
    ):
        return [(reply, call.held) async for reply in replies]


async def test_the_server_gets_the_trace_of_a_request(tmp_path: Path) -> None:
    heads: list[bytes] = []
    trace = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1")
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
    call = HeldCall()
    async with running(tmp_path, always(TOKEN, usage, DONE), heads.append) as (runner, _):
        for request in (FORWARDED, msgspec.structs.replace(FORWARDED, trace=trace)):
            async with asyncio.timeout(PATIENCE_S), aclosing(runner.forward(request, call)) as replies:
                assert [reply async for reply in replies]
    plain, traced = heads
    assert b"traceparent" not in plain
    assert f"traceparent: {trace.parent}\r\n".encode() in traced and b"tracestate: vendor=1\r\n" in traced


async def test_the_last_reply_has_all_that_was_metered(tmp_path: Path) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
    async with running(tmp_path, always(TOKEN, usage, DONE)) as (runner, _):
        replies = await replies_of(runner, HeldCall())
    assert [held for _, held in replies] == [1, 1, 0]
    last = replies[-1][0]
    assert isinstance(last, ForwardedChunk) and last.last and last.completion_tokens == 2


async def test_an_error_within_a_stream_is_an_error(tmp_path: Path) -> None:
    failure = b'data: {"error":{"message":"the engine is dead"}}\n\n'
    async with running(tmp_path, always(TOKEN, failure, DONE)) as (runner, _):
        for run in (replies_of, outputs_of):
            call = HeldCall()
            with pytest.raises(ServerRefused, match="engine is dead"):
                await run(runner, call)
            assert call.held == 0


@pytest.mark.parametrize("events", [(TOKEN, DONE), (TOKEN,), (DONE,)])
async def test_a_sequence_without_an_end_is_lost(tmp_path: Path, events: tuple[bytes, ...]) -> None:
    async with running(tmp_path, always(*events)) as (runner, _):
        with pytest.raises(ServerLost, match="ended a stream"):
            await outputs_of(runner, HeldCall())


async def test_calls_of_a_closed_runner_end(tmp_path: Path) -> None:
    async with running(tmp_path, always(TOKEN, END, DONE)) as (runner, _):
        assert [output.token_id for output in await outputs_of(runner, HeldCall())] == [8, 9]
        await runner.aclose()
        for run in (replies_of, outputs_of):
            call = HeldCall()
            with pytest.raises(ServerLost, match="stopped"):
                await run(runner, call)
            assert call.held == 0


async def test_the_loads_of_a_server_are_not_known(tmp_path: Path) -> None:
    async with running(tmp_path, always(DONE)) as (runner, _), native_first() as both:
        assert runner.load is None and both.first.load is None


class Both:
    """The two engines of an instance: the native one steps when `gate` lets it, vLLM starts on `start`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.gate = StepGate()
        self.engine = FakeEngine(gate=self.gate)
        self.vllm: asyncio.Future[VllmRunner] = loop.create_future()
        self.ready, self.native_ended = asyncio.Event(), asyncio.Event()
        self.starting = asyncio.create_task(self._start())
        self.first = NativeFirst(
            EngineRunner(self.engine, name="native", meter=NullMeter()),
            self.starting,
            on_vllm=self.ready.set,
            on_native_ended=self._on_native_ended,
        )

    async def start(self, runner: VllmRunner) -> None:
        self.vllm.set_result(runner)
        await self.ready.wait()

    async def _start(self) -> VllmRunner:
        return await self.vllm

    async def _on_native_ended(self) -> None:
        assert self.engine.closed
        self.native_ended.set()


@asynccontextmanager
async def native_first() -> AsyncIterator[Both]:
    both = Both()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield both
    finally:
        both.gate.open()
        await both.first.aclose()


async def test_a_sequence_goes_on_in_vllm(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(body["prompt"])
        writer.write(END + DONE)

    async with running(tmp_path, answer) as (runner, _), native_first() as both:
        outputs = both.first.generate(sequence("r", [5], max_tokens=10), HeldCall())
        both.gate.release()
        first = await anext(outputs)
        await both.start(runner)
        both.gate.open()
        made = [first.token_id, *[output.token_id async for output in outputs]]
        await both.native_ended.wait()
    assert asked == [[5, *made[:-1]]] and made[-1] == 9


async def test_requests_that_wait_for_vllm_are_lost_with_the_instance() -> None:
    async with native_first() as both:
        waiting = asyncio.create_task(replies_of(both.first, HeldCall()))
        await asyncio.sleep(0)
        await both.first.aclose()
        with pytest.raises(ServerLost, match="stopped"):
            await waiting


async def test_requests_that_wait_for_vllm_end_with_its_start() -> None:
    async with native_first() as both:
        waiting = asyncio.create_task(replies_of(both.first, HeldCall()))
        both.vllm.set_exception(EngineError("no memory"))
        await both.first.wait_closed()
        with pytest.raises(EngineError, match="no memory"):
            await waiting
        assert str(both.first.failure) == "no memory"


async def test_a_sequence_ends_with_the_instance_however_slow_its_client(tmp_path: Path) -> None:
    async with running(tmp_path, always(END, DONE)) as (runner, _), native_first() as both:
        call = HeldCall()
        outputs = both.first.generate(sequence("r", [5], max_tokens=10), call)
        both.gate.open()
        await anext(outputs)
        await both.start(runner)
        await both.first.aclose()
        with pytest.raises(EngineError):
            await anext(outputs)
        assert call.held == 0


async def test_a_server_that_takes_no_connections_has_failed(tmp_path: Path) -> None:
    async with running(tmp_path, always(END)) as (runner, server):
        closed = asyncio.create_task(runner.wait_closed())
        (tmp_path / "scratch" / "http.sock").unlink()
        with pytest.raises(ServerLost, match="ConnectError"):
            await anext(runner.generate(sequence("r", [5]), HeldCall()))
        await closed
        assert isinstance(runner.failure, ServerLost) and not server.ended.is_set()


async def test_the_end_of_vllm_is_seen_while_a_client_is_slow(tmp_path: Path) -> None:
    async with running(tmp_path, always(END, DONE)) as (runner, server), native_first() as both:
        outputs = both.first.generate(sequence("r", [5], max_tokens=10), HeldCall())
        both.gate.open()
        await anext(outputs)
        await both.start(runner)
        await server.aclose()
        await both.first.wait_closed()
        assert isinstance(both.first.failure, ServerLost) and not both.native_ended.is_set()
        await outputs.aclose()
