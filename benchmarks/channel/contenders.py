"""What carries the messages of `benchmarks.channel`: the channel, kept libraries, and bare bytes.

Each has a server for a process of its own, and a client that makes calls to it.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from registry.channel import Channel, ChannelServer
from registry.messages import Generate, Reply, Request, Sampling, Tokens

SECRET = b"only for measuring"
END = b"\xc0"  # msgpack nil: no message starts with it

_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def request_for(tokens: int) -> Generate:
    """A small request that asks for `tokens` tokens."""
    return Generate(
        request_id="0123456789abcdef",
        instance_id="i",
        prompt_ids=tuple(range(32)),
        sampling=Sampling(max_tokens=tokens),
    )


async def replies_to(request: Request) -> AsyncIterator[Reply]:
    assert isinstance(request, Generate)
    for token in range(request.sampling.max_tokens):
        yield Tokens(ids=(token,))
        if token % 8 == 7:
            await asyncio.sleep(0)  # an engine's step: tokens come a few at a time


class Client(Protocol):
    async def call(self, request: Request) -> int:
        """Make a call and return how many replies came."""
        ...


@dataclass(frozen=True, slots=True)
class Contender:
    """`serve(ready)` runs in a process of its own and tells its address by `ready`."""

    name: str
    serve: Callable[[Callable[[str], None]], Coroutine[None, None, None]]
    connect: Callable[[str], contextlib.AbstractAsyncContextManager[Client]]


# Ours.


class ChannelClient:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def call(self, request: Request) -> int:
        count = 0
        async with self._channel.call(request) as replies:
            async for _ in replies:
                count += 1
        return count


async def serve_channel(ready: Callable[[str], None]) -> None:
    async with ChannelServer("tcp://127.0.0.1:0", SECRET, replies_to) as server:
        ready(server.url)
        await asyncio.get_running_loop().create_future()


@asynccontextmanager
async def connect_channel(url: str) -> AsyncIterator[Client]:
    channel = await Channel.connect(url, SECRET)
    yield ChannelClient(channel)
    await channel.aclose()


# A rival's client: replies are sorted to their calls by id.


class SortingClient:
    """Sends (id, body) and awaits replies until END, over any message transport."""

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
        while (body := await replies.get()) != END:
            _decode_reply(body)
            count += 1
        del self._calls[id_]
        return count

    def received(self, id_: bytes, body: bytes) -> None:
        self._calls[id_].put_nowait(body)


async def _answer(body: bytes, send: Callable[[bytes], Awaitable[None]]) -> None:
    async for reply in replies_to(_decode_request(body)):
        await send(_encode(reply))
    await send(END)


# pyzmq: ROUTER and DEALER.


async def serve_zmq(ready: Callable[[str], None]) -> None:
    zmq: Any = importlib.import_module("zmq")
    context = importlib.import_module("zmq.asyncio").Context()
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)  # at its mark a ROUTER drops messages without a word
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ready(f"tcp://127.0.0.1:{port}")
    async with asyncio.TaskGroup() as group:
        while True:
            peer, id_, body = await socket.recv_multipart()

            async def send(reply: bytes, peer: bytes = peer, id_: bytes = id_) -> None:
                await socket.send_multipart([peer, id_, reply])

            group.create_task(_answer(body, send))


@asynccontextmanager
async def connect_zmq(url: str) -> AsyncIterator[Client]:
    zmq: Any = importlib.import_module("zmq")
    context = importlib.import_module("zmq.asyncio").Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(url)

    async def send(id_: bytes, body: bytes) -> None:
        await socket.send_multipart([id_, body])

    client = SortingClient(send)

    async def receive() -> None:
        while True:
            client.received(*await socket.recv_multipart())

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

                group.create_task(_answer(message.data[4:], send))
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
async def connect_websocket(url: str) -> AsyncIterator[Client]:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.ws_connect(url, compress=0) as socket:

        async def send(id_: bytes, body: bytes) -> None:
            await socket.send_bytes(id_ + body)

        client = SortingClient(send)

        async def receive() -> None:
            async for message in socket:
                client.received(message.data[:4], message.data[4:])

        receiving = asyncio.create_task(receive())
        yield client
        receiving.cancel()
        await asyncio.wait({receiving})


# The floor: bytes back and forth.


class _Bounce(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _FloorClient(asyncio.Protocol):
    """One call at a time: sends a request's bytes and waits for as many."""

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
    server = await asyncio.get_running_loop().create_server(_Bounce, "127.0.0.1", 0)
    ready(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


@asynccontextmanager
async def connect_floor(port: str) -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(_FloorClient, "127.0.0.1", int(port))
    yield client
    client.transport.close()


def contenders() -> list[Contender]:
    found = [
        Contender("floor", serve_floor, connect_floor),
        Contender("hypercast", serve_channel, connect_channel),
    ]
    if importlib.util.find_spec("zmq"):
        found.append(Contender("pyzmq", serve_zmq, connect_zmq))
    if importlib.util.find_spec("aiohttp"):
        found.append(Contender("aiohttp-websocket", serve_websocket, connect_websocket))
    return found
