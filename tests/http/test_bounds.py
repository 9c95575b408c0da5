"""What is no request at all, or too much of one, is answered in the envelope and costs no memory."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from gateway.core.contract import Event, FunctionCall
from gateway.core.settings import RequestLimits
from gateway.fakes.dispatcher import HOT
from gateway.http.protocol import MAX_HEAD_BYTES, MAX_HEADERS, BoundedHttpProtocol
from registry.messages.node import HandlerChunk
from registry.records.function import FunctionTask
from tests.fixtures.gateway_http import gateway
from tests.fixtures.patience import PATIENCE_S, until

BAD_HEADS = {
    "long path": (b"GET /" + b"a" * (MAX_HEAD_BYTES + 1) + b" HTTP/1.1\r\n\r\n", 431),
    "long header": (b"GET /livez HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n", 431),
    "many headers": (b"GET /livez HTTP/1.1\r\n" + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
    "no HTTP": (b"\x16\x03\x01 hello\r\n\r\n", 400),
    "bad content length": (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    "non-ASCII path": (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
}


async def answer(port: int, data: bytes, *more: bytes) -> tuple[int, dict[str, object]]:
    """Send, and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(data)
            for part in more:
                await writer.drain()
                writer.write(part)
            raw = await reader.read()
    except ConnectionError:
        raw = b""
    finally:
        writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("fault", BAD_HEADS)
async def test_a_bad_head_is_refused(fault: str) -> None:
    async with gateway() as gw:
        data, status = BAD_HEADS[fault]
        found, error = await answer(gw.server.port, data)
        assert found == status and error["message"] and error["code"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nx: ",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
    ],
    ids=["header", "chunk extension", "trailer"],
)
async def test_endless_fields_are_cut(head: bytes) -> None:
    """They never come to an end, so nothing but their length can stop them."""
    async with gateway() as gw:
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        writer.write(head)
        sent = 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                while sent < 64 << 20 and not reader.at_eof():
                    writer.write(b"a" * 65_536)
                    await writer.drain()
                    sent += 65_536
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        writer.close()
        assert sent < 32 << 20  # what sockets buffer, not all of it


async def test_no_answer_is_written_into_another() -> None:
    async def endless(call: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        yield HandlerChunk(data=b'{"n":1}', stream=True)
        await asyncio.Event().wait()

    async with gateway(grace_s=0.1) as gw, asyncio.timeout(PATIENCE_S):
        await gw.add_function("h", FunctionTask.HANDLER)
        gw.dispatcher.script = endless
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        head = f"POST /functions/h/invoke HTTP/1.1\r\nauthorization: Bearer {gw.caller_key}\r\n"
        call = head.encode() + b"content-length: 2\r\n\r\n{}"
        writer.write(call)
        await reader.readuntil(b'{"n":1}\n\n\r\n')
        writer.write(call + b"no HTTP\r\n\r\n")  # a second request, which waits, and then rubbish
        assert await reader.read() == b""
        writer.close()


async def test_a_slow_head_is_given_up() -> None:
    async with gateway(limits=RequestLimits(body_idle_s=0.2)) as gw:
        status, error = await answer(gw.server.port, b"GET /livez HTTP/1.1\r\nx: ")
        assert (status, error["code"]) == (408, "head_timeout")
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""  # a silent client gets no answer
        writer.close()


async def test_unknown_paths_and_methods() -> None:
    async with gateway() as gw, gw.http() as http:
        nowhere = await http.get("/nowhere")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
        for method, path, allowed in (
            ("PUT", "/admin/functions", "GET, HEAD, POST"),
            ("OPTIONS", "/admin/functions/a", "DELETE, GET, HEAD, PATCH"),
            ("TRACE", "/v1/completions", "POST"),
            ("DELETE", "/livez", "GET, HEAD"),
        ):
            wrong = await http.request(method, path)
            assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)
            assert wrong.json()["error"]["code"] == "method_not_allowed"
        for path in ("/livez", "/v1/models", "/admin/nodes", "/openapi.json"):
            whole, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(whole.content))
        async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as stranger:
            assert (await stranger.options("/v1/models")).status_code == 401


async def test_a_whole_response_arrives_in_one_piece() -> None:
    async with gateway() as gw, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
        writer.write(f"GET /v1/models HTTP/1.1\r\nauthorization: Bearer {gw.caller_key}\r\n\r\n".encode())
        head, _, body = (await reader.read(1 << 16)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and json.loads(body)["object"] == "list"
        writer.close()


@pytest.mark.parametrize(
    "header", [(b"x-none", b""), (b"x-two", b"a\r\nb: c"), (b"x three", b""), (b"content-length", b"3")]
)
async def test_an_error_replaces_a_head_that_got_no_body_or_must_not_be_sent(
    header: tuple[bytes, bytes],
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"2"), header]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if header[0] == b"x-none":
            raise RuntimeError("it has no body")
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(app, port=0, http=BoundedHttpProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ") and body == b"Internal Server Error"
    writer.close()
    server.should_exit = True
    await serving
