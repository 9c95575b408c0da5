"""A node's side of the channel for tests: handlers that do what the request names."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from registry.channel import Channel, ChannelServer
from registry.errors import ChannelClosed
from registry.messages import Done, HandlerChunk, InvokeHandler, LogLines, Reply, Request, TailLogs

SECRET = b"a secret of the cluster"


class Refused(Exception):
    """A handler's failure with a code of its own."""

    code = "draining"


@dataclass(slots=True)
class Node:
    """A handler whose behaviour the request names, and what happened inside it."""

    sent: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: Request) -> AsyncIterator[Reply]:
        match request:
            case TailLogs(function="count", lines=lines):
                for line in range(lines):
                    yield LogLines(lines=(str(line),))
            case TailLogs(function="flood"):
                while True:
                    yield LogLines(lines=("x" * 1000,))
                    self.sent += 1
            case TailLogs(function="hang"):
                self.started.set()
                try:
                    yield LogLines(lines=("first",))
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            case TailLogs(function="refuse"):
                yield LogLines(lines=("before",))
                raise Refused("this node is leaving")
            case TailLogs(function="crash"):
                raise KeyError("a fault")
            case TailLogs(function="cancelled within"):
                other = asyncio.get_running_loop().create_future()
                other.cancel()
                await other
            case TailLogs(function="another channel"):
                raise ChannelClosed("the other node has gone")
            case InvokeHandler(body=body):
                yield HandlerChunk(data=body)
            case _:
                yield Done()


@dataclass(frozen=True, slots=True)
class Rig:
    """A node, its server, a channel to it, and what either side was told when that closed."""

    node: Node
    server: ChannelServer
    channel: Channel
    lost: list[str]


def tail(what: str, lines: int = 3) -> TailLogs:
    return TailLogs(function=what, lines=lines)
