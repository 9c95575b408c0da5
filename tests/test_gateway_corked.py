"""A transport that writes once a turn: in one piece, and not to a connection that is lost."""

import asyncio
import socket
from typing import Any

import uvloop

from gateway.corked import CorkedTransport


class Peer(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


def test_what_is_written_in_a_turn_arrives_together_and_nothing_after_the_connection_is_lost() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        failed: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: failed.append(context))
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        transport, peer = await loop.create_connection(Peer, sock=ours)
        corked = CorkedTransport(transport)
        corked.write(b"head ")
        corked.write(b"body")
        assert await loop.sock_recv(theirs, 100) == b"head body"
        corked.write(b"never")
        corked.abort()
        await peer.lost.wait()
        corked.write(b"late")
        await asyncio.sleep(0)  # the end of the turn
        await asyncio.sleep(0)
        corked.write(b"too late")
        corked.close()
        assert await loop.sock_recv(theirs, 100) == b""
        theirs.close()
        assert not failed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
