"""Clients that do not read: what is kept for them, what they are billed, and how they are let go."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from gateway.core.contract import Event, FunctionCall
from gateway.core.settings import StreamSettings
from gateway.fakes.dispatcher import HOT, repeat_prompt
from registry.messages.node import Tokens
from registry.records.usage import RequestStatus
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S, until

BODY = b'{"model":"coder","prompt":"x","stream":true,"max_tokens":9000000}'


async def connect(gw: Gateway, request_id: str, *, receive_bytes: int | None = None) -> socket.socket:
    """Return a raw connection on which a stream was asked for."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", gw.server.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {request_id}\r\n"
        f"authorization: Bearer {gw.caller_key}\r\ncontent-length: {len(BODY)}\r\n\r\n"
    )
    await loop.sock_sendall(client, head.encode() + BODY)
    return client


async def cut_off(gw: Gateway) -> None:
    """Wait until the gateway has no connection left; the kernel drops a stuck one silently."""
    await until(lambda: not gw.server.server_state.connections)


@pytest.mark.parametrize("receive_bytes", [4096, None])
async def test_one_that_reads_nothing_is_held_back_cut_off_and_billed_for_what_was_sent(
    receive_bytes: int | None,
) -> None:
    async with gateway(streams=StreamSettings(write_timeout_s=0.6)) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), context_length=0)
        given = 0

        async def flood(call: FunctionCall) -> AsyncIterator[Event]:
            nonlocal given
            if call.tenant != "acme":
                async for event in repeat_prompt(call):
                    yield event
                return
            yield HOT
            while True:
                given += 1
                yield Tokens(ids=(5,), gpu_us=given)
                await asyncio.sleep(0)

        gw.dispatcher.script = flood
        stuck = await connect(gw, "stuck", receive_bytes=receive_bytes)
        await gw.dispatcher.until(lambda: bool(gw.dispatcher.open))
        other = await gw.openai(gw.admin_key).completions.create(model="coder", prompt="x", max_tokens=5)
        assert other.usage is not None and other.usage.completion_tokens == 5
        async with asyncio.timeout(PATIENCE_S):
            await gw.dispatcher.until(lambda: bool(gw.dispatcher.left_early))
            assert await gw.services.limiter.wait_idle(PATIENCE_S)
            for opened in gw.clients:
                await opened.close()
            await cut_off(gw)
        (record,) = await gw.state.requests_by_client_id("stuck")
        assert record.status is RequestStatus.CANCELLED
        assert given - 1 <= record.completion_tokens <= given < 1500
        stuck.close()


async def test_one_that_leaves_after_some_events_is_billed_for_them() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer(), context_length=0)
        read = asyncio.Event()

        async def paced(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            for count in range(1, 4):
                yield Tokens(ids=(5,), gpu_us=1000 * count)
            await read.wait()
            yield Tokens(ids=(5,), gpu_us=4000)
            await asyncio.Event().wait()

        gw.dispatcher.script = paced
        client, seen = await connect(gw, "left"), b""
        while seen.count(b"data: ") < 3:
            seen += await asyncio.get_running_loop().sock_recv(client, 4096)
        read.set()
        client.close()
        async with asyncio.timeout(PATIENCE_S):
            await gw.dispatcher.until(lambda: bool(gw.dispatcher.left_early))
            await gw.services.limiter.wait_idle(PATIENCE_S)
        (record,) = await gw.state.requests_by_client_id("left")
        assert record.status is RequestStatus.CANCELLED and 3 <= record.completion_tokens <= 4
