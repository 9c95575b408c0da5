"""The gateway-invoker channel over real sockets: streams, errors, cancellation, credit, silence."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import pytest
import uvloop

from rdmacast.protocol.connection import dial, listen
from registry.channel.client import Channel, ChannelServer, ChannelSettings
from registry.channel.connection import SERVICE
from registry.channel.frames import INITIAL_CREDIT, ChannelFrameKind, FrameSplitter, pack
from registry.errors import ChannelClosed, ChannelError, RemoteError
from registry.messages.node import Acknowledged, GetStatus, HandlerChunk, InvokeHandler, LogChunk
from tests.fixtures.channel import SECRET, Node, Rig, tail
from tests.fixtures.patience import PATIENCE_S

Run = Callable[..., None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    async def rigged(body: Callable[[Rig], Awaitable[None]], limits: ChannelSettings | None) -> None:
        node, lost = Node(), list[str]()

        def peer_closed(peer: str, reason: ChannelClosed) -> None:
            lost.append(f"server: {reason}")

        def closed(channel: Channel, reason: ChannelClosed) -> None:
            lost.append(f"client: {reason}")

        server = ChannelServer(
            "tcp://127.0.0.1:0", SECRET, node.handle, settings=limits, on_peer_closed=peer_closed
        )
        async with server, asyncio.timeout(PATIENCE_S):
            channel = await Channel.connect(server.url, SECRET, settings=limits, on_closed=closed)
            await body(Rig(node, server, channel, lost))
            await channel.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert "0 peers, 0 calls" in repr(server)

    def runner(body: Callable[[Rig], Awaitable[None]], limits: ChannelSettings | None = None) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(rigged(body, limits))

    return runner


def test_a_call_streams_its_replies_in_order(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("count", 5000)) as replies:
            got = [reply async for reply in replies]
        assert got == [LogChunk(lines=(str(i),)) for i in range(5000)]
        assert await rig.channel.ask(GetStatus()) == Acknowledged()
        with pytest.raises(ChannelError, match="is empty"):
            await rig.channel.ask(tail("count", 0))

    run(body)


def test_many_calls_share_the_connection(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async def one(index: int) -> None:
            data = bytes([index % 256]) * (index * 37)
            assert await rig.channel.ask(
                InvokeHandler(request_id=str(index), instance_id="i", body=data)
            ) == HandlerChunk(data=data)

        await asyncio.gather(*(one(index) for index in range(300)))
        assert "0 calls" in repr(rig.channel)

    run(body)


def test_bodies_beyond_the_credit_pass_and_beyond_the_bound_do_not(run: Run) -> None:
    async def body(rig: Rig) -> None:
        data = random.Random(0).randbytes(3 << 20)
        request = InvokeHandler(request_id="r", instance_id="i", body=data)
        assert await rig.channel.ask(request) == HandlerChunk(data=data)
        with pytest.raises(ChannelError, match="exceeds the limit"):
            await rig.channel.ask(InvokeHandler(request_id="r", instance_id="i", body=data * 2))
        assert await rig.channel.ask(GetStatus()) == Acknowledged()

    run(body, ChannelSettings(max_frame_bytes=4 << 20))


def test_leaving_a_call_cancels_its_handler(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("hang")) as replies:
            assert await anext(aiter(replies)) == LogChunk(lines=("first",))
        await rig.node.cancelled.wait()
        assert await rig.channel.ask(GetStatus()) == Acknowledged()

    run(body)


def test_cancelling_the_caller_cancels_its_handler(run: Run) -> None:
    async def body(rig: Rig) -> None:
        asking = asyncio.create_task(rig.channel.ask(tail("hang")))
        await rig.node.started.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await rig.node.cancelled.wait()

    run(body)


def test_failures_keep_their_code_and_what_came_before(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("refuse")) as replies:
            assert await anext(aiter(replies)) == LogChunk(lines=("before",))
            with pytest.raises(RemoteError, match="draining: this node is leaving") as caught:
                await anext(aiter(replies))
        assert caught.value.code == "draining"
        with pytest.raises(RemoteError) as caught:
            await rig.channel.ask(tail("crash"))
        assert (caught.value.code, caught.value.message) == ("internal", "'a fault'")

    run(body)


@pytest.mark.parametrize(
    ("what", "message"),
    [("cancelled within", "the handler was cancelled"), ("another channel", "the other node has gone")],
)
def test_a_handler_that_ends_oddly_still_ends_its_call(run: Run, what: str, message: str) -> None:
    async def body(rig: Rig) -> None:
        with pytest.raises(RemoteError, match=message) as failure:
            await rig.channel.ask(tail(what))
        assert failure.value.code == "internal"
        assert await rig.channel.ask(GetStatus()) == Acknowledged()

    run(body)


def test_a_slow_reader_stops_its_own_handler_only(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("flood")) as slow:
            assert await anext(aiter(slow)) == LogChunk(lines=("x" * 1000,))
            for _ in range(20):
                async with rig.channel.call(tail("count", 500)) as replies:
                    assert len([reply async for reply in replies]) == 500
            assert 100 < rig.node.sent <= INITIAL_CREDIT / 1000 + 2
            before = rig.node.sent
            for _ in range(before + 100):
                await anext(aiter(slow))
            assert rig.node.sent >= before + 100

    run(body)


def test_calls_beyond_the_bound_are_refused_one_by_one(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("hang")), rig.channel.call(tail("hang")):
            with pytest.raises(RemoteError, match="overloaded"):
                await rig.channel.ask(GetStatus())
        assert await rig.channel.ask(GetStatus()) == Acknowledged()

    run(body, ChannelSettings(max_calls=2))


def test_a_server_that_closes_ends_every_call(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("hang")) as replies:
            await anext(aiter(replies))
            waiting = asyncio.create_task(rig.channel.ask(tail("flood")))
            await rig.server.aclose()
            with pytest.raises(ChannelClosed):
                await anext(aiter(replies))
            with pytest.raises(ChannelClosed):
                await waiting
        assert rig.node.cancelled.is_set() and rig.channel.is_closed
        with pytest.raises(ChannelClosed):
            await rig.channel.ask(GetStatus())
        assert sorted(line.split(":")[0] for line in rig.lost) == ["client", "server"]

    run(body)


def test_a_client_that_closes_ends_its_handlers(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("hang")) as replies:
            await anext(aiter(replies))
            await rig.channel.aclose()
            with pytest.raises(ChannelClosed, match="was closed"):
                await anext(aiter(replies))
        await rig.node.cancelled.wait()

    run(body)


def test_pings_keep_an_idle_channel_and_its_calls(run: Run) -> None:
    async def body(rig: Rig) -> None:
        async with rig.channel.call(tail("hang")) as replies:
            await anext(aiter(replies))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await anext(aiter(replies))
        assert not rig.channel.is_closed and not rig.lost

    run(body, ChannelSettings(ping_interval_s=0.05, ping_timeout_s=0.5))


class _Scripted(asyncio.Protocol):
    """A peer that authenticates and then follows `script`: sent at once, or as its first answer."""

    def __init__(self, script: bytes, *, answers: bool = False) -> None:
        self._script = script
        self._answers = answers
        self.received = bytearray()
        self.heard = asyncio.Event()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._answers:
            self._transport.write(self._script)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.heard.set()
        if self._answers:
            self._transport.write(self._script)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def close(self) -> None:
        self._transport.close()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (b"", "silent"),
        (b"\xff" * 64, "unknown frame kind"),
        (pack(ChannelFrameKind.OPEN, 1), "a server sent OPEN"),
        (pack(ChannelFrameKind.DATA, 1, b"\xc1"), "a reply is malformed"),
        (pack(ChannelFrameKind.LAST, 1, b"\xc1"), "a reply is malformed"),
        (pack(ChannelFrameKind.ERROR, 1, b"\xc1"), "an ERROR frame is malformed"),
        (
            pack(ChannelFrameKind.DATA, 1, msgspec.msgpack.encode(LogChunk(lines=("x" * 1000,)))) * 400,
            "credit",
        ),
    ],
)
async def test_a_server_that_misbehaves_closes_the_channel(script: bytes, why: str) -> None:
    listener = await listen(
        "tcp://127.0.0.1:0",
        secret=SECRET,
        service=SERVICE,
        make_protocol=lambda: _Scripted(script, answers=True),
        timeout_s=PATIENCE_S,
    )
    limits = ChannelSettings(ping_interval_s=0.05, ping_timeout_s=PATIENCE_S if script else 0.2)
    closed = asyncio.Event()
    channel = await Channel.connect(
        listener.endpoint.url, SECRET, settings=limits, on_closed=lambda *_: closed.set()
    )
    with pytest.raises(ChannelClosed, match=why):
        async with channel.call(GetStatus()) as replies:
            await closed.wait()
            async for _ in replies:
                pass
    await channel.aclose()
    listener.close()


def test_the_last_reply_brings_the_end_and_no_other_waits_for_what_follows(run: Run) -> None:
    async def body(rig: Rig) -> None:
        asked = [GetStatus(), tail("hang"), tail("count", 2)]
        opens = [
            pack(ChannelFrameKind.OPEN, id_, msgspec.msgpack.encode(one)) for id_, one in enumerate(asked)
        ]
        peer = _Scripted(b"".join(opens))
        await dial(
            rig.server.url, secret=SECRET, service=SERVICE, make_protocol=lambda: peer, timeout_s=PATIENCE_S
        )
        kinds: dict[int, list[ChannelFrameKind]] = {}
        while sum(map(len, kinds.values())) < 4:
            peer.heard.clear()
            await peer.heard.wait()
            kinds = {}
            for kind, call, _ in FrameSplitter(1 << 20).split(bytes(peer.received)):
                if kind not in (ChannelFrameKind.PING, ChannelFrameKind.PONG):
                    kinds.setdefault(call, []).append(ChannelFrameKind(kind))
        assert kinds == {
            0: [ChannelFrameKind.LAST],
            1: [ChannelFrameKind.DATA],
            2: [ChannelFrameKind.DATA, ChannelFrameKind.LAST],
        }
        peer.close()
        await peer.lost.wait()
        await rig.node.cancelled.wait()

    run(body)


def test_a_peer_that_sends_a_long_frame_hears_pings_meanwhile(run: Run) -> None:
    async def body(rig: Rig) -> None:
        peer = await dial(
            rig.server.url,
            secret=SECRET,
            service=SERVICE,
            make_protocol=lambda: _Scripted(pack(ChannelFrameKind.OPEN, 1, bytes(1 << 20))[:100]),
            timeout_s=PATIENCE_S,
        )
        while pack(ChannelFrameKind.PING, 0) not in peer.received:
            peer.heard.clear()
            peer._transport.write(b"\0")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await peer.heard.wait()
        peer._transport.close()
        await peer.lost.wait()

    run(body, ChannelSettings(ping_interval_s=0.05, ping_timeout_s=PATIENCE_S))


@pytest.mark.parametrize(
    "script",
    [
        b"\0" * 9,
        pack(ChannelFrameKind.DATA, 1),
        pack(ChannelFrameKind.OPEN, 1, msgspec.msgpack.encode(tail("hang"))) * 2,
        (1 << 31).to_bytes(4, "big") + bytes([ChannelFrameKind.OPEN]) + bytes(4),
        pack(ChannelFrameKind.CREDIT, 1),
    ],
)
def test_a_client_that_misbehaves_is_hung_up_on_and_others_go_on(run: Run, script: bytes) -> None:
    async def body(rig: Rig) -> None:
        bad = await dial(
            rig.server.url,
            secret=SECRET,
            service=SERVICE,
            make_protocol=lambda: _Scripted(script),
            timeout_s=PATIENCE_S,
        )
        await bad.lost.wait()
        assert await rig.channel.ask(GetStatus()) == Acknowledged()

    run(body)


def test_a_malformed_request_fails_alone(run: Run) -> None:
    async def body(rig: Rig) -> None:
        odd = await dial(
            rig.server.url,
            secret=SECRET,
            service=SERVICE,
            make_protocol=lambda: _Scripted(pack(ChannelFrameKind.OPEN, 7, b"\x81\xa4type\xa7Nothing")),
            timeout_s=PATIENCE_S,
        )
        await odd.heard.wait()
        ((kind, call, failure),) = (
            (k, c, bytes(b)) for k, c, b in FrameSplitter(1 << 20).split(odd.received)
        )
        assert (kind, call) == (ChannelFrameKind.ERROR, 7) and b"bad_request" in failure

    run(body)


async def test_a_failed_connection_has_a_reason() -> None:
    async with ChannelServer("tcp://127.0.0.1:0", SECRET, Node().handle) as server:
        with pytest.raises(ChannelError, match="secret"):
            await Channel.connect(server.url, b"other")
        url = server.url
    with pytest.raises(ChannelClosed, match="cannot connect"):
        await Channel.connect(url, SECRET)
