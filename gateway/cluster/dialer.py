"""The real NodeClient, over a gateway-invoker channel."""

import asyncio
import ssl

from gateway.cluster.node_client import Dial, NodeCall, NodeClient
from rdmacast.protocol.handshake import Secret
from registry.channel.client import Channel
from registry.errors import ChannelClosed
from registry.messages.node import Request
from registry.records.node import NodeRecord


class NodeChannel:
    """A channel to a node with an awaitable end."""

    def __init__(self) -> None:
        self._closed = asyncio.Event()
        self._channel: Channel | None = None

    def __repr__(self) -> str:
        return f"<ChannelClient {self._channel!r}>"

    @classmethod
    async def connect(cls, url: str, secret: Secret, tls: ssl.SSLContext | None = None) -> "NodeChannel":
        """Dial and authenticate. Raises ChannelError."""
        client = cls()
        client._channel = await Channel.connect(url, secret, tls=tls, on_closed=client._on_closed)
        return client

    def call(self, request: Request) -> NodeCall:
        assert self._channel is not None
        return self._channel.call(request)

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.aclose()

    def _on_closed(self, channel: Channel, reason: ChannelClosed) -> None:
        self._closed.set()


def channel_dialer(secret: Secret, tls: ssl.SSLContext | None = None) -> Dial:
    """Return a dialer for the channel address of node records, authenticated by the cluster's secret."""

    async def dial(record: NodeRecord) -> NodeClient:
        return await NodeChannel.connect(record.channel, secret, tls)

    return dial
