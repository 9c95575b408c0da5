"""Connections, pipelined requests and bodies are bounded in all, and one client leaves room for others."""

import asyncio
import gc
import json
import subprocess
import sys

import pytest

from benchmarks.harness.processes import ROOT
from gateway.core.settings import RequestLimits
from gateway.http.connections import ConnectionLimiter
from gateway.http.drain import InFlightLimiter
from gateway.http.protocol import MAX_PIPELINED, BoundedHttpProtocol
from registry.records.function import FunctionTask
from tests.fixtures.gateway_http import Gateway, gateway
from tests.fixtures.patience import PATIENCE_S, until

_ASK = b"GET /livez HTTP/1.1\r\nhost: gw\r\n\r\n"


async def exchange(gw: Gateway, data: bytes) -> bytes:
    """Send, and read until the gateway closes or, with data unread, resets the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(data)
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_an_address_leaves_connections_to_others() -> None:
    limiter = ConnectionLimiter(10)
    assert [limiter.admit("flood") for _ in range(10)] == [True] * 8 + [False] * 2
    assert limiter.admit("quiet")
    limiter.release("flood")
    assert limiter.admit("flood") and not limiter.admit("flood")
    for _ in range(8):
        limiter.release("flood")
    limiter.release("quiet")
    assert limiter.open == 0 and limiter.admit("flood")


def test_an_ebb_is_announced_once_after_many_connections() -> None:
    ebbs: list[int] = []
    limiter = ConnectionLimiter(1000, lambda: ebbs.append(limiter.open))
    for _ in range(2):
        for _ in range(400):
            limiter.admit("a")
        for _ in range(400):
            limiter.release("a")
    for _ in range(100):
        limiter.admit("a")
        limiter.release("a")
    assert ebbs == [100, 100]


def test_the_memory_of_many_connections_is_given_back() -> None:
    # In a process of its own: what other tests freed would take the bodies.
    command = [sys.executable, "-m", "tests.fixtures.many_connections"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    before, during, after = json.loads(done.stdout)
    assert before < after < during


async def test_connections_beyond_the_limit_are_refused_and_come_back() -> None:
    async with gateway(max_connections=10) as gw:
        idle = [await asyncio.open_connection("127.0.0.1", gw.server.port) for _ in range(8)]
        refused = await exchange(gw, b"")
        head, _, body = refused.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and json.loads(body)["error"]["code"] == "overloaded"
        for _, writer in idle:
            writer.close()

        async def served() -> bool:
            return (await exchange(gw, _ASK.replace(b"host", b"connection: close\r\nhost"))).startswith(
                b"HTTP/1.1 200 "
            )

        async with asyncio.timeout(PATIENCE_S):
            while not await served():
                pass


async def test_a_silent_connection_is_closed() -> None:
    async with gateway(limits=RequestLimits(first_byte_s=0.05)) as gw:
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        writer.write(_ASK[:10])
        assert await exchange(gw, b"") == b""
        # One that has begun before has the time of a whole head.
        writer.write(_ASK[10:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_pipelined_requests_are_bounded_and_free_their_memory() -> None:
    async with gateway() as gw:
        raw = await exchange(gw, _ASK * (MAX_PIPELINED + 1) + _ASK[:-2] + b"connection: close\r\n\r\n")
        assert raw.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED + 1

        def connections() -> int:
            return sum(type(one) is BoundedHttpProtocol for one in gc.get_objects())

        gc.disable()  # counting references must be enough
        try:
            for _ in range(20):
                await exchange(gw, _ASK * 5000)
            await until(lambda: connections() <= 2)
        finally:
            gc.enable()


async def test_bodies_are_bounded_together() -> None:
    async with gateway(body_memory_bytes=1 << 20) as gw:
        await gw.add_function("echo", FunctionTask.HANDLER)
        head = (
            b"POST /functions/echo/invoke HTTP/1.1\r\nhost: gw\r\ncontent-length: 700000\r\n"
            b"authorization: Bearer " + gw.caller_key.encode() + b"\r\n\r\n"
        )
        _, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        writer.write(head + b'"' + b"a" * 600_000)
        limiter = gw.services.limiter
        await until(lambda: limiter.body_bytes >= 600_000)
        other_reader, other = await asyncio.open_connection("127.0.0.1", gw.server.port)
        other.write(head + b'"' + b"a" * 600_000)
        assert (await asyncio.wait_for(other_reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 503 ")
        other.close()
        writer.close()
        await until(lambda: limiter.body_bytes == 0)
        assert not limiter.in_flight and not limiter.arriving


def test_a_tenant_leaves_memory_to_others() -> None:
    limiter = InFlightLimiter(10, body_bytes=1000)
    limiter.charge_body("flood", 800)
    with pytest.raises(Exception, match="bodies"):
        limiter.charge_body("flood", 1)
    limiter.charge_body("quiet", 100)
    limiter.refund_body("flood", 800)
    limiter.refund_body("quiet", 100)
    assert limiter.body_bytes == 0


async def test_following_logs_with_a_body_gives_its_place_back_once() -> None:
    async with gateway() as gw:
        await gw.add_function()
        async with gw.http() as http:
            for _ in range(3):
                answer = await http.request("GET", "/admin/functions/coder/logs?lines=1", content=b"{}")
                assert answer.status_code == 200
        limiter = gw.services.limiter
        await until(lambda: limiter.in_flight == 0 and limiter.arriving == 0)
