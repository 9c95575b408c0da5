"""The real seam to a node: a NodeClient over a gateway-invoker channel."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from gateway.node_client import Dial, NodeClient
from registry.channel import Channel
from registry.errors import ChannelClosed
from registry.messages import Reply, Request
from registry.node import NodeRecord


class ChannelClient:
    """A channel that can be waited on for its end."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._channel: Channel | None = None

    def __repr__(self) -> str:
        return f"<ChannelClient {self._channel!r}>"

    @classmethod
    async def connect(cls, url: str, secret: bytes) -> "ChannelClient":
        """Dial and authenticate. Raises ChannelError."""
        client = cls()
        client._channel = await Channel.connect(url, secret, on_closed=client._on_closed)
        return client

    def call(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        assert self._channel is not None
        return self._channel.call(request)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.aclose()

    def _on_closed(self, channel: Channel, reason: ChannelClosed) -> None:
        self._closed.set()


def channel_dial(secret: bytes) -> Dial:
    """Dial nodes at the channel address of their records, with the cluster's secret."""

    async def dial(record: NodeRecord) -> NodeClient:
        return await ChannelClient.connect(record.channel, secret)

    return dial
