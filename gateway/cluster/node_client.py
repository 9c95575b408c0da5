"""Protocols of a channel to a node.

`gateway.cluster.dialer.NodeChannel` is the real one, `gateway.fakes.node.FakeNode` the fake.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, Self

from registry.messages.node import Reply, Request
from registry.records.node import NodeRecord


class NodeCall(Protocol):
    """A call to a node: a context manager and async iterator over its replies.

    Raises (on entry or from the iterator) ChannelClosed when the node is lost and RemoteError when it replies
    with an error. Leaving the context early cancels the call on the node.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Reply: ...

    def take(self) -> Reply | None:
        """Return the next reply if it has arrived; None to wait for it with the iterator."""
        ...

    def cancel(self) -> None:
        """Leave the call at once, without waiting for the node. Idempotent."""
        ...


class NodeClient(Protocol):
    """An open channel to one node."""

    def call(self, request: Request) -> NodeCall:
        """Return a call, to be entered."""
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
