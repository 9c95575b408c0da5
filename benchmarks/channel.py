"""The gateway-invoker channel beside kept libraries, between two processes on loopback.

`python -m benchmarks.channel --json FILE` measures, in turns: the latency of one call at a time, calls
a second with 16 and 64 in flight, and streams of tokens. Every contender carries the same messages
(registry.messages, encoded by msgspec) and tells calls apart by an id; the rivals have neither flow
control nor cancellation nor authentication, which the channel has. `floor` is a bare asyncio protocol
that echoes bytes of the same length: no multiplexing and no messages.
pyzmq and aiohttp are measured where they are installed.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import uvloop

from benchmarks.machine import describe_machine, write_records
from registry.channel import Channel, ChannelServer
from registry.messages import Generate, Reply, Request, Sampling, Tokens

SECRET = b"only for measuring"
STREAMS, TOKENS = 64, 400
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


# Measuring.


def _process(
    serve: Callable[[Callable[[str], None]], Coroutine[None, None, None]], to_parent: Connection
) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(to_parent.send))


async def unary(client: Client, calls: int, in_flight: int) -> list[float]:
    """The seconds that each of `calls` calls took, `in_flight` at a time."""
    request = request_for(1)
    left = iter(range(calls))
    seconds: list[float] = []

    async def caller() -> None:
        for _ in left:
            started = time.perf_counter()
            assert await client.call(request) == 1
            seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return seconds


async def streams(client: Client, count: int, tokens: int) -> list[float]:
    """Read `count` streams of `tokens` tokens at once."""
    request = request_for(tokens)
    for got in await asyncio.gather(*(client.call(request) for _ in range(count))):
        if got != tokens:
            raise RuntimeError(f"{got} of {tokens} tokens came")
    return []


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one figure: `items` calls or tokens moved in `wall_s`, for `cpu_s` of both processes."""

    items: int
    wall_s: float
    cpu_s: float
    each_s: list[float]  # of single calls, where they were timed


async def _sample(server: psutil.Process, items: int, work: Awaitable[list[float]]) -> Sample:
    def cpu_s() -> float:
        theirs = server.cpu_times()
        return time.process_time() + theirs.user + theirs.system

    cpu_before, started = cpu_s(), time.perf_counter()
    each_s = await work
    return Sample(items, time.perf_counter() - started, cpu_s() - cpu_before, each_s)


async def measure(contender: Contender, url: str, pid: int, calls: int) -> dict[str, Sample]:
    """One round of every figure."""
    server = psutil.Process(pid)
    async with contender.connect(url) as client:
        await unary(client, calls // 4, 1)
        out = {"echo": await _sample(server, calls, unary(client, calls, 1))}
        if contender.name != "floor":
            for in_flight in (16, 64):
                work = unary(client, 4 * calls, in_flight)
                out[f"unary-{in_flight}"] = await _sample(server, 4 * calls, work)
            out["stream"] = await _sample(server, STREAMS * TOKENS, streams(client, STREAMS, TOKENS))
        return out


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


def run(rounds: int, calls: int) -> list[dict[str, object]]:
    """Measure all contenders in turns, each against a fresh server process every round."""
    spawn = multiprocessing.get_context("spawn")
    gathered: dict[tuple[str, str], list[Sample]] = {}
    for _ in range(rounds):
        for contender in contenders():
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_process, args=(contender.serve, theirs), daemon=True)
            process.start()
            try:
                assert process.pid is not None
                samples = uvloop.run(measure(contender, mine.recv(), process.pid, calls))
            finally:
                process.terminate()
                process.join()
            for figure, sample in samples.items():
                gathered.setdefault((figure, contender.name), []).append(sample)
    limit_s = statistics.median(s for sample in gathered["echo", "floor"] for s in sample.each_s)
    common = {"rounds": rounds, "calls": calls, **describe_machine("benchmarks.channel")}
    return [
        _record(figure, name, samples, limit_s, common)
        for (figure, name), samples in sorted(gathered.items())
    ]


def _record(
    figure: str, name: str, samples: list[Sample], limit_s: float, common: dict[str, object]
) -> dict[str, object]:
    record: dict[str, object] = {
        "name": name,
        "params": {"figure": figure, **common},
        "cpu_us_per_item": statistics.median(1e6 * sample.cpu_s / sample.items for sample in samples),
    }
    if figure == "echo":
        each_s = sorted(s for sample in samples for s in sample.each_s)
        median_s = statistics.median(each_s)
        return record | {
            "seconds": [statistics.median(sample.each_s) for sample in samples],
            "median_s": median_s,
            "p99_s": each_s[int(0.99 * len(each_s))],
            "limit_s": limit_s,
            "ratio_to_limit": median_s / limit_s,
        }
    return record | {
        "seconds": [sample.wall_s for sample in samples],
        "median_s": statistics.median(sample.wall_s for sample in samples),
        "per_second": statistics.median(sample.items / sample.wall_s for sample in samples),
    }


def show(record: dict[str, Any]) -> str:
    """One line for people."""
    if "per_second" in record:
        figure = f"{record['per_second']:10,.0f} /s"
    else:
        figure = f"{record['median_s'] * 1e6:7.1f} us, p99 {record['p99_s'] * 1e6:.1f} us"
    cpu = f"{record['cpu_us_per_item']:6.1f} us of processor each"
    return f"{record['params']['figure']:10} {record['name']:18} {figure:30} {cpu}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.channel", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4000)
    args = parser.parse_args()
    records = run(args.rounds, args.calls)
    for record in records:
        print(show(record))
    if args.json:
        write_records(args.json, records)


if __name__ == "__main__":
    main()
