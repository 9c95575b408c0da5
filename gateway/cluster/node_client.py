"""Protocols of a channel to a node.

`gateway.cluster.dialer.NodeChannel` is the real one, `gateway.fakes.node.FakeNode` the fake.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from registry.messages.node import Reply, Request
from registry.records.node import NodeRecord


class NodeClient(Protocol):
    """An open channel to one node."""

    def call(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """Open a call. Leaving the context early cancels it on the node.

        Raises (on entry or from the iterator) ChannelClosed when the node is lost and RemoteError when
        it replies with an error.
        """
        ...

    async def wait_closed(self) -> None:
        """Return once either side has closed the channel."""
        ...

    async def aclose(self) -> None:
        """Close the channel; calls in progress end with ChannelClosed. Idempotent."""
        ...


class ChannelPool(Protocol):
    """The channels to all nodes."""

    def client(self, node: str) -> NodeClient | None:
        """Return the open channel to the node, None while there is none."""
        ...

    def report_broken(self, node: str) -> None:
        """Report a broken channel: the node is out of routing until a new channel is up."""
        ...


Dial = Callable[[NodeRecord], Awaitable[NodeClient]]
"""A function that opens a channel to a node. Raises ChannelError or OSError."""
