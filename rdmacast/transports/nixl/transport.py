"""Reads by NIXL, over whatever network its backend finds; over TCP the peer says when and where.

A read asks for its range as one by RDMA does (`verbs.py`), by an agent that only this link uses: so what is
under way when the link ends goes with the agent, and nothing is written afterwards.
"""

import asyncio
import mmap
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast.client_link import ClientLink
from rdmacast.controlled import ControlledTransport
from rdmacast.destination import writable_parts
from rdmacast.errors import CastError, DeviceError, LinkClosed, NoTransport, NotShared
from rdmacast.nixl_node import NixlNode
from rdmacast.nixl_reader import NixlReader
from rdmacast.queued_link import QueuedLink
from rdmacast.settings import LinkSettings
from rdmacast.transport import Began, Link, PeerAddress
from rdmacast.verbs_address import RemoteMemory
from rdmacast.verbs_reads import MESSAGE_BYTES, ReadQueue
from rdmacast.wire import MAX_READ_BYTES

_DEPTH = 8  # reads under way: each poll makes progress on all of them, on the event loop


class NixlLink(QueuedLink):
    """A Link by one agent, controlled over TCP."""

    transport = "nixl"

    def __init__(self, link: ClientLink, reader: NixlReader, reads: ReadQueue) -> None:
        super().__init__(link, reads)
        self._reader = reader

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        for start, part in writable_parts(into, MAX_READ_BYTES):
            async with self._link.shown(region, offset + start, len(part)) as shown:
                if began is not None:
                    began()
                try:
                    self._reader.know(shown.metadata)
                    with self._reader.memory.registered.local(part) as local:
                        await self._reads.read(local, RemoteMemory(shown.address, 0), len(part))
                except DeviceError as error:
                    if self._link.reason is not None:  # the agent was closed with the link, by another read
                        raise LinkClosed(str(self._link.reason)) from error
                    raise NotShared(f"NIXL cannot read this: {error}") from error


class NixlTransport(ControlledTransport):
    """Makes NixlLinks from `node`, which must outlive them."""

    name = "nixl"

    def __init__(
        self,
        secret: bytes,
        node: NixlNode,
        *,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        super().__init__(secret, tls, settings)
        self._node = node

    def __repr__(self) -> str:
        return f"NixlTransport({self._node!r})"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        """Raises NoTransport, too, where the peer offers no NIXL or no path leads to it."""
        async with self._control(peer) as link:
            try:
                reader = await self._node.reader()
            except DeviceError as error:
                raise NoTransport(f"no NIXL: {error}") from error
            reads = ReadQueue(reader, _DEPTH, MESSAGE_BYTES, link.abort)
            link.on_closed(lambda reason: reads.close(LinkClosed(str(reason))))
            try:
                await self._probe(link, reader, reads, peer)
                nixl = NixlLink(link, reader, reads)
                yield nixl
                await nixl.aclose()
            finally:
                reads.close(LinkClosed("the link was closed"))

    async def _probe(self, link: ClientLink, reader: NixlReader, reads: ReadQueue, peer: PeerAddress) -> None:
        """Read what only this peer can give: their networks may not meet."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        # Not by cancelling: a read that is given up is waited for.
        late = asyncio.get_running_loop().call_later(
            self._settings.handshake_timeout_s, link.abort, LinkClosed("nothing came over it")
        )
        try:
            async with link.met() as meeting:
                view = memoryview(page)[: len(meeting.nonce)]
                reader.know(meeting.probe.metadata)
                with reader.memory.registered.local(view) as local:
                    await reads.read(local, RemoteMemory(meeting.probe.address, 0), len(view))
                right = view == meeting.nonce
        except NotShared as error:
            raise NoTransport(f"no NIXL: {error}") from error
        except CastError as error:
            raise NoTransport(f"no NIXL path to {peer.url}: {error}") from error
        finally:
            late.cancel()
        if not right:
            raise NoTransport(f"the NIXL path to {peer.url} leads to another node")
