"""Channels to FakeNodes without sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rdmacast.aio.groups import cancel_and_discard
from registry.errors import ChannelClosed, RemoteError
from registry.messages.node import Reply, Request
from registry.records.node import NodeRecord

if TYPE_CHECKING:
    from gateway.fakes.node import FakeNode

Send = Callable[[Reply], Awaitable[None]]


class Latch:
    """A latch, open by default; a test closes it to block something, and may wait for arrivals at it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._arrived = asyncio.Event()
        self.yields = True  # what passes it while it is open lets other tasks run
        self.waiting = 0

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        self._arrived.clear()

    async def arrived(self) -> None:
        """Return once a task waits at the closed latch."""
        await self._arrived.wait()

    async def through(self) -> None:
        if not self._open.is_set():
            self.waiting += 1
            self._arrived.set()
            try:
                await self._open.wait()
            finally:
                self.waiting -= 1
        elif self.yields:
            await asyncio.sleep(0)


class FakeNet:
    """All fake nodes by channel address; `dial` is the gateways' Dial."""

    def __init__(self) -> None:
        self.nodes: dict[str, FakeNode] = {}

    async def dial(self, record: NodeRecord) -> "FakeChannel":
        node = self.nodes.get(record.channel)
        if node is None or not node.alive:
            raise ChannelClosed(f"connection refused by {record.channel}")
        return node.open_channel()


class FakeChannel:
    """One gateway's channel to one node."""

    def __init__(self, node: "FakeNode") -> None:
        self._node = node
        self._closed = asyncio.Event()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def aclose(self) -> None:
        self._closed.set()
        self._node.channels.discard(self)

    def call(self, request: Request) -> "FakeCall":
        return FakeCall(self._node, self._closed, request)


class FakeCall:
    """A call under way. One that is not exited continues at its node, as when a gateway dies."""

    def __init__(self, node: "FakeNode", closed: asyncio.Event, request: Request) -> None:
        self._node = node
        self._closed = closed
        self._request = request
        self._replies: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        self._end: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "FakeCall":
        if self._closed.is_set():
            raise ChannelClosed(f"the channel to {self._node.id} is closed")
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_discard(*self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def __aiter__(self) -> "FakeCall":
        return self

    async def __anext__(self) -> Reply:
        if self._end is None and (reply := self._split(await self._replies.get())) is not None:
            return reply
        assert self._end is not None
        raise self._end

    def take(self) -> Reply | None:
        if self._end is not None or self._replies.empty():
            return None
        return self._split(self._replies.get_nowait())

    def _split(self, item: "Reply | Exception") -> Reply | None:
        """Return a reply; keep an end."""
        if not isinstance(item, Exception):
            return item
        self._end = item
        return None

    async def _serve(self) -> None:
        try:
            await self._node.answer(self._request, self._replies.put)
            await self._replies.put(StopAsyncIteration())
        except RemoteError as error:
            await self._replies.put(error)

    async def _watch(self) -> None:
        await self._closed.wait()
        await self._replies.put(ChannelClosed(f"node {self._node.id} is gone"))
