"""The message transports that `benchmarks.channel` compares: the channel, libraries and bare bytes.

Each has a server, in a process of its own (`python -m benchmarks.channel.contenders SOCKET RANK NAME`), and
a client that makes calls.
"""

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import uvloop

from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import NO_ORDERS, MemberHello
from registry.channel.client import Channel, ChannelServer
from registry.messages.node import Generate, Reply, Request, Tokens
from registry.messages.sampling import Sampling

SECRET = b"only for measuring"
END_OF_CALL = b"\xc0"  # msgpack nil: no message starts with it

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def request_for(tokens: int) -> Generate:
    """Return a small request for `tokens` tokens."""
    return Generate(
        request_id="0123456789abcdef",
        instance_id="i",
        prompt_ids=tuple(range(32)),
        sampling=Sampling(max_tokens=tokens),
    )


async def generate_replies(request: Request) -> AsyncIterator[Reply]:
    assert isinstance(request, Generate)
    for token in range(request.sampling.max_tokens):
        yield Tokens(ids=(token,))
        if token % 8 == 7:
            await asyncio.sleep(0)  # one engine step: tokens arrive a few at a time


class ContenderClient(Protocol):
    """A client that makes calls over one transport."""

    async def call(self, request: Request) -> int:
        """Make a call and return the number of replies."""
        ...


@dataclass(frozen=True, slots=True)
class ChannelContender:
    """A transport; `serve(ready)` runs in a process of its own and reports its address by `ready`."""

    name: str
    serve: Callable[[Callable[[str], None]], Coroutine[None, None, None]]
    connect: Callable[[str], contextlib.AbstractAsyncContextManager[ContenderClient]]


# Ours.


class OurChannelClient:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def call(self, request: Request) -> int:
        count = 0
        async with self._channel.call(request) as replies:
            async for _ in replies:
                count += 1
        return count


async def serve_channel(ready: Callable[[str], None]) -> None:
    async with ChannelServer("tcp://127.0.0.1:0", SECRET, generate_replies) as server:
        ready(server.url)
        await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def connect_channel(url: str) -> AsyncIterator[ContenderClient]:
    channel = await Channel.connect(url, SECRET)
    yield OurChannelClient(channel)
    await channel.aclose()


# The rivals' client: replies are matched to calls by id.


class CorrelatingClient:
    """A client that sends (id, body) over any message transport and awaits replies until END_OF_CALL."""

    def __init__(self, send: Callable[[bytes, bytes], Awaitable[None]]) -> None:
        self._send = send
        self._calls: dict[bytes, asyncio.Queue[bytes]] = {}
        self._next = 0

    async def call(self, request: Request) -> int:
        self._next += 1
        id_ = self._next.to_bytes(4, "big")
        replies = self._calls[id_] = asyncio.Queue()
        await self._send(id_, _encode(request))
        count = 0
        while (body := await replies.get()) != END_OF_CALL:
            _decode_reply(body)
            count += 1
        del self._calls[id_]
        return count

    def on_message(self, id_: bytes, body: bytes) -> None:
        self._calls[id_].put_nowait(body)


async def _send_replies(body: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
    async for reply in generate_replies(_decode_request(body)):
        await send(_encode(reply))
    await send(END_OF_CALL)


# pyzmq: ROUTER and DEALER.


async def serve_zmq(ready: Callable[[str], None]) -> None:
    zmq: Any = importlib.import_module("zmq")
    context = importlib.import_module("zmq.asyncio").Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)  # a ROUTER silently drops messages at its high-water mark
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ready(f"tcp://127.0.0.1:{port}")
    async with asyncio.TaskGroup() as group:
        while True:
            peer, id_, body = await socket.recv_multipart()

            async def send(reply: bytes, peer: bytes = peer, id_: bytes = id_) -> None:
                await socket.send_multipart([peer, id_, reply])

            group.create_task(_send_replies(body, send))


@asynccontextmanager
async def connect_zmq(url: str) -> AsyncIterator[ContenderClient]:
    zmq: Any = importlib.import_module("zmq")
    context = importlib.import_module("zmq.asyncio").Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(url)

    async def send(id_: bytes, body: bytes) -> None:
        await socket.send_multipart([id_, body])

    client = CorrelatingClient(send)

    async def receive() -> None:
        while True:
            client.on_message(*await socket.recv_multipart())

    receiving = asyncio.create_task(receive())
    yield client
    receiving.cancel()
    await asyncio.wait({receiving})
    context.destroy(linger=0)


# aiohttp: one WebSocket.


async def serve_websocket(ready: Callable[[str], None]) -> None:
    from aiohttp import web

    async def handle(request: Any) -> Any:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        async with asyncio.TaskGroup() as group:
            async for message in socket:

                async def send(reply: bytes, id_: bytes = message.data[:4]) -> None:
                    await socket.send_bytes(id_ + reply)

                group.create_task(_send_replies(message.data[4:], send))
        return socket

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    ready(f"http://{host}:{port}/")
    await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def connect_websocket(url: str) -> AsyncIterator[ContenderClient]:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.ws_connect(url, compress=0) as socket:

        async def send(id_: bytes, body: bytes) -> None:
            await socket.send_bytes(id_ + body)

        client = CorrelatingClient(send)

        async def receive() -> None:
            async for message in socket:
                client.on_message(message.data[:4], message.data[4:])

        receiving = asyncio.create_task(receive())
        yield client
        receiving.cancel()
        await asyncio.wait({receiving})


# The floor: bytes back and forth.


class _EchoProtocol(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _FloorClient(asyncio.Protocol):
    """A client with one call at a time, which sends a request's bytes and waits for as many."""

    def __init__(self) -> None:
        self._left = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        if not self._left and self._done is not None:
            self._done.set_result(None)

    async def call(self, request: Request) -> int:
        body = _encode(request)
        self._left = len(body)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(body)
        await self._done
        return 1


async def serve_floor(ready: Callable[[str], None]) -> None:
    server = await asyncio.get_running_loop().create_server(_EchoProtocol, "127.0.0.1", 0)
    ready(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


@asynccontextmanager
async def connect_floor(port: str) -> AsyncIterator[ContenderClient]:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(_FloorClient, "127.0.0.1", int(port))
    yield client
    client.transport.close()


def contenders() -> list[ChannelContender]:
    found = [
        ChannelContender("floor", serve_floor, connect_floor),
        ChannelContender("hypercast", serve_channel, connect_channel),
    ]
    if importlib.util.find_spec("zmq"):
        found.append(ChannelContender("pyzmq", serve_zmq, connect_zmq))
    if importlib.util.find_spec("aiohttp"):
        found.append(ChannelContender("aiohttp-websocket", serve_websocket, connect_websocket))
    return found


async def serve(path: str, rank: int, name: str) -> None:
    """Serve one transport until the benchmark closes the connection."""
    contender = next(one for one in contenders() if one.name == name)
    url = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(contender.serve(url.set_result))
    await serve_async(path, MemberHello(rank=rank, url=await url), NO_ORDERS)
    serving.cancel()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
