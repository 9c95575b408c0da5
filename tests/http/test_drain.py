"""Deadlines, slow clients and the way out of a gateway."""

import asyncio
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from starlette.types import Message

from gateway.core.contract import Deadlines, Event, FunctionCall, WaitStage
from gateway.core.errors import ApiError
from gateway.core.settings import RequestLimits, StreamSettings
from gateway.fakes.dispatcher import HOT, repeat_prompt
from gateway.http.drain import InFlightLimiter
from gateway.http.limits import read_body
from rdmacast.protocol.tls import TlsFiles, load_client
from registry.config.tls import TlsSettings
from registry.messages.node import Tokens
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from tests.fixtures.gateway_http import byte_tokenizer, gateway
from tests.fixtures.loops import on_both_loops
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.tls import issue

_ASK = b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n\r\n"


async def test_drain_lets_streams_end_and_refuses_what_is_new() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        more = asyncio.Event()

        async def slow(call: FunctionCall) -> AsyncIterator[Event]:
            async for event in repeat_prompt(call):
                yield event
                if isinstance(event, Tokens):
                    await more.wait()

        gw.dispatcher.script = slow
        client = gw.openai()
        stream = await client.completions.create(model="coder", prompt="ab", max_tokens=4, stream=True)
        chunks = aiter(stream)
        first = await anext(chunks)
        gw.services.limiter.drain()
        gw.server.leave()
        async with gw.http() as http:
            assert (await http.get("/readyz")).status_code == 503
            refused = await http.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["connection"] == "close" and refused.headers["retry-after"]
            assert (await http.get("/livez")).status_code == 200
        more.set()
        rest = [chunk async for chunk in chunks]
        assert "".join(c.choices[0].text for c in [first, *rest] if c.choices) == "abab"
        assert (await gw.state.report(UsageFilter()))[0].requests == 1


@on_both_loops
@pytest.mark.parametrize(
    ("sent", "rest", "is_secure"),
    [(b"", _ASK, False), (_ASK[:9], _ASK[9:], False), (_ASK, b"", False), (b"", _ASK, True)],
    ids=["connected", "half a head", "a request", "TLS not begun"],
)
async def test_what_connected_before_the_listener_closes_gets_a_response(
    sent: bytes, rest: bytes, is_secure: bool, tmp_path: Path
) -> None:
    files = issue(tmp_path)
    client = load_client(TlsFiles(ca=files.ca)) if is_secure else None
    tls = TlsSettings(http=TlsFiles(cert=files.cert, key=files.key)) if is_secure else TlsSettings()
    async with gateway(tls=tls) as gw:
        gw.services.limiter.drain()
        with socket.create_connection(("127.0.0.1", gw.server.port)) as connection:
            # Until here the event loop had no turn: it has not accepted the connection, nor read from it.
            connection.sendall(sent)
            closing = asyncio.create_task(gw.server.shutdown())
            reader, writer = await asyncio.open_connection(
                sock=connection, ssl=client, server_hostname="127.0.0.1" if is_secure else None
            )
            await until(lambda: gw.server.connections.is_closing)
            writer.write(rest)
            async with asyncio.timeout(PATIENCE_S):
                answer = await reader.read()
                writer.close()
                await closing
        assert answer.startswith(b"HTTP/1.1 503") and b'"draining"' in answer


async def test_a_silent_connection_has_a_moment_for_a_request() -> None:
    async with gateway() as gw:
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        begin_s = time.monotonic()
        gw.server.leave()
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        assert time.monotonic() - begin_s > 0.5
        writer.close()


async def test_a_second_signal_waits_for_no_connection() -> None:
    async with gateway() as gw:
        _, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        writer.write(_ASK[:9])
        await until(lambda: gw.server.connections.open == 1)
        gw.server.handle_exit(signal.SIGTERM, None)
        await until(lambda: gw.server.connections.is_closing)
        gw.server.handle_exit(signal.SIGTERM, None)
        await asyncio.wait_for(asyncio.shield(gw.serving), PATIENCE_S)
        assert gw.server.connections.open == 1
        writer.close()


async def test_what_outlasts_the_grace_time_is_cut_and_billed() -> None:
    async with gateway(grace_s=0.05) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def endless(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            yield Tokens(ids=(1,), gpu_us=1000)
            await asyncio.Event().wait()

        gw.dispatcher.script = endless
        stream = await gw.openai().completions.create(model="coder", prompt="x", stream=True)
        chunks = aiter(stream)
        await anext(chunks)
        gw.server.leave()
        with pytest.raises(openai.APIError):
            [chunk async for chunk in chunks]
        await gw.services.limiter.wait_idle(PATIENCE_S)
        record = await gw.state.request(stream.response.headers["x-request-id"])
        assert record.status is RequestStatus.CANCELLED and record.billed_gpu_ms == 1


async def test_a_whole_answer_that_outlasts_the_grace_time_is_told_to_go_elsewhere() -> None:
    async with gateway(grace_s=0.05) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def endless(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            yield Tokens(ids=(1,), gpu_us=1000)
            gw.server.leave()
            await asyncio.Event().wait()

        gw.dispatcher.script = endless
        with pytest.raises(openai.InternalServerError) as reported:
            await gw.openai().completions.create(model="coder", prompt="x")
        assert (reported.value.status_code, reported.value.code) == (503, "draining")


@pytest.mark.parametrize(
    ("deadlines", "stage", "limit"),
    [(Deadlines(start_s=1.0), "copy", "first output"), (Deadlines(total_s=1.0), "copy", "whole request")],
)
async def test_time_that_runs_out_before_the_first_output(
    deadlines: Deadlines, stage: str, limit: str
) -> None:
    async with gateway(deadlines=deadlines) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def stuck(call: FunctionCall) -> AsyncIterator[Event]:
            yield WaitStage(stage="copy", fraction=0.5)
            await asyncio.Event().wait()

        gw.dispatcher.script = stuck
        with pytest.raises(openai.InternalServerError, match=f"'{stage}'.*{limit}") as late:
            await gw.openai().completions.create(model="coder", prompt="x")
        assert (late.value.status_code, late.value.code) == (504, "timeout")
        assert not gw.dispatcher.open


async def test_a_start_that_makes_progress_is_waited_for() -> None:
    async with gateway(deadlines=Deadlines(start_s=1.5)) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def load(call: FunctionCall) -> AsyncIterator[Event]:
            for tenth in range(8):  # longer in all than a start without progress may take
                yield WaitStage(stage="fetch", fraction=tenth / 10)
                await asyncio.sleep(0.2)
            async for event in repeat_prompt(call):
                yield event

        async def again_and_again(call: FunctionCall) -> AsyncIterator[Event]:
            while True:
                for stage, fraction in (("queue", 0.0), ("fetch", 0.1), ("fetch", 0.2)):
                    yield WaitStage(stage=stage, fraction=fraction)
                    await asyncio.sleep(0.1)

        gw.dispatcher.script = load
        await gw.openai().completions.create(model="coder", prompt="x", max_tokens=1)
        gw.dispatcher.script = again_and_again
        with pytest.raises(openai.InternalServerError, match="progress"):
            await gw.openai().completions.create(model="coder", prompt="x")


async def test_time_that_runs_out_between_outputs() -> None:
    async with gateway(deadlines=Deadlines(idle_s=0.5)) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def stalls(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            yield Tokens(ids=(1,))
            await asyncio.Event().wait()

        gw.dispatcher.script = stalls
        stream = await gw.openai().completions.create(model="coder", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="next output"):
            [chunk async for chunk in stream]


async def test_a_body_that_does_not_come_is_given_up_and_holds_up_no_drain() -> None:
    limits = RequestLimits(body_idle_s=1.5)
    async with gateway(limits=limits) as gw:
        limiter = gw.services.limiter
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gw.caller_key}\r\n"
            "content-length: 100\r\n\r\n"
        )
        connections = [await asyncio.open_connection("127.0.0.1", gw.server.port) for _ in range(5)]
        for _, writer in connections:
            writer.write(head.encode() + b'{"model')
        while limiter.arriving < 5:  # noqa: ASYNC110 (no event for it)
            await asyncio.sleep(0)
        assert limiter.in_flight == 0 and await limiter.wait_idle(0)
        for reader, writer in connections:
            answer = await reader.read()  # to the end: the gateway closes
            assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
            writer.close()
        assert (limiter.arriving, limiter.in_flight) == (0, 0)


async def test_a_body_must_have_come_in_time_and_takes_a_place_meanwhile() -> None:
    async def drip() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    with pytest.raises(ApiError) as late:
        await read_body({"headers": []}, drip, RequestLimits(body_total_s=0.1))
    assert (late.value.status, late.value.code) == (408, "body_timeout")
    limiter = InFlightLimiter(1)
    limiter.begin_body()
    with pytest.raises(ApiError, match="in flight"):
        limiter.acquire()
    limiter.admit()
    assert (limiter.arriving, limiter.in_flight) == (0, 1)


def test_one_tenant_never_takes_all_in_flight_slots() -> None:
    limiter, got = InFlightLimiter(100), Counter[str]()
    for tenant in ("flood", "second", "third"):
        with pytest.raises(ApiError, match="this tenant has"):
            for _ in range(100):
                limiter.acquire()
                try:
                    limiter.charge(tenant)
                except ApiError:
                    limiter.release()
                    raise
                got[tenant] += 1
    assert got == {"flood": 80, "second": 16, "third": 3}
    limiter.acquire()
    limiter.charge("quiet")
    for _ in range(80):
        limiter.refund("flood")
        limiter.release()
    limiter.acquire()
    limiter.charge("flood")


async def test_a_client_that_reads_nothing_holds_the_stream_back() -> None:
    streams = StreamSettings(write_timeout_s=0.3)
    async with gateway(streams=streams) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), context_length=0)
        sent = 0

        async def flood(call: FunctionCall) -> AsyncIterator[Event]:
            nonlocal sent
            yield HOT
            for _ in range(200_000):
                sent += 1
                yield Tokens(ids=(5,) * 200)

        gw.dispatcher.script = flood
        body = b'{"model":"coder","prompt":"x","stream":true,"return_token_ids":true,"max_tokens":9000000}'
        _, writer = await asyncio.open_connection("127.0.0.1", gw.server.port, limit=4096)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            b"authorization: Bearer " + gw.caller_key.encode() + b"\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            await gw.dispatcher.until(lambda: bool(gw.dispatcher.left_early))
        assert sent < 100_000  # held back by the full socket, then given up
        writer.close()
