"""The control side over real channels: loopback sockets and the cluster's secret."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.cluster.dialer import NodeChannel, channel_dialer
from gateway.control.assembly import make_control
from gateway.fakes.channel import FakeNet
from gateway.fakes.node import FakeNode, tokens_after
from registry.channel.client import ChannelServer
from registry.errors import ChannelError
from registry.memory.state import MemoryState
from registry.messages.node import Reply, Request
from tests.fixtures.control import AnyBlobs, ask, make_call, make_node, make_version

SECRET = b"s" * 32


async def answers(node: FakeNode, request: Request) -> AsyncIterator[Reply]:
    """Yield a FakeNode's replies as a stream."""
    replies: asyncio.Queue[Reply | None] = asyncio.Queue()

    async def serve() -> None:
        try:
            await node.answer(request, replies.put)
        finally:
            replies.put_nowait(None)

    serving = asyncio.create_task(serve())
    try:
        while (reply := await replies.get()) is not None:
            yield reply
        await serving
    finally:
        serving.cancel()


async def test_calls_run_over_real_channels_and_a_cut_one_is_dialled_again() -> None:
    state = MemoryState()
    node = FakeNode(state, FakeNet(), "n0")
    async with ChannelServer("tcp://127.0.0.1:0", SECRET, lambda request: answers(node, request)) as server:
        node.listening(server.url)
        await node.up()
        version = await state.create_version(make_version(), None)
        async with make_control(
            state=state,
            blobs=AnyBlobs(),  # type: ignore[arg-type]
            dial=channel_dialer(SECRET),
            gateway_id="g",
        ) as control:
            answer = await ask(control, make_call(version))
            assert answer.ids == tokens_after((1, 2, 3), 4)
            control.dispatcher.links.report_broken("n0")
            assert not list(control.state_cache.usable_nodes())
            again = await ask(control, make_call(version))
            assert again.ids == answer.ids
            assert node.counts["starts"] == 1


async def test_a_wrong_secret_does_not_connect() -> None:
    node = FakeNode(MemoryState(), FakeNet(), "n0")
    async with ChannelServer("tcp://127.0.0.1:0", SECRET, lambda request: answers(node, request)) as server:
        with pytest.raises(ChannelError):
            await NodeChannel.connect(server.url, b"x" * 32)
        with pytest.raises(ChannelError):
            await channel_dialer(SECRET)(make_node("gone", channel="tcp://127.0.0.1:1"))
