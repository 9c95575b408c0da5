"""The seam to a node: calls over its channel. `registry.channel.Channel` is the real one,
`gateway.fake_node.FakeNode` the fake."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from registry.messages import Reply, Request
from registry.node import NodeRecord


class NodeClient(Protocol):
    """An open channel to one node."""

    def call(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Reply]]:
        """Open a call. Leaving the context early cancels it on the node.

        Raises (on entry or from the iterator) ChannelClosed when the node is gone and RemoteError when
        it answers with an error.
        """
        ...

    async def wait_closed(self) -> None:
        """Return once the channel is closed, by whichever side."""
        ...

    async def aclose(self) -> None:
        """Close; calls under way end with ChannelClosed. Idempotent."""
        ...


class Links(Protocol):
    """The channels to all nodes, kept up by someone else."""

    def client(self, node: str) -> NodeClient | None:
        """The open channel to the node, None while there is none."""
        ...

    def lost(self, node: str) -> None:
        """A call found the channel broken: take the node out of routing until a fresh one is up."""
        ...


Dial = Callable[[NodeRecord], Awaitable[NodeClient]]
"""Open a channel to the node. Raises ChannelError or OSError."""
