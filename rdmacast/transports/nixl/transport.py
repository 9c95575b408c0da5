"""Reads by NIXL, over any network of its backend, controlled over TCP.

Each link has an agent of its own: what is under way when the link ends is ended with the agent, and nothing
is written afterwards.
"""

import asyncio
import mmap
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rdmacast.destination import writable_parts
from rdmacast.errors import CastError, DeviceError, LinkClosed, NoTransport, NotShared
from rdmacast.protocol.client_link import ClientLink
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.wire import MAX_READ_BYTES
from rdmacast.settings import LinkSettings
from rdmacast.transport import Link, OnStart, PeerAddress
from rdmacast.transports.controlled import ControlledTransport, decode_reply
from rdmacast.transports.nixl.memory import NixlMemory, NixlProbe
from rdmacast.transports.nixl.node import NixlNode
from rdmacast.transports.nixl.reader import NixlReader
from rdmacast.transports.queued_link import QueuedLink
from rdmacast.transports.verbs.address import RemoteMemory
from rdmacast.transports.verbs.reads import MESSAGE_BYTES, ReadQueue

_DEPTH = 8  # reads under way: each poll makes progress on all of them, on the event loop


class NixlLink(QueuedLink):
    """A Link by one agent, controlled over TCP."""

    transport = "nixl"

    def __init__(self, link: ClientLink, reader: NixlReader, reads: ReadQueue) -> None:
        super().__init__(link, reads)
        self._reader = reader

    async def read_into(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None = None
    ) -> None:
        for start, part in writable_parts(into, MAX_READ_BYTES):
            async with self._link.export(self.transport, region, offset + start, len(part)) as reply:
                memory = decode_reply(self._link, NixlMemory.decode, reply)
                if on_start is not None:
                    on_start()
                try:
                    self._reader.load_metadata(memory.metadata)
                    with self._reader.memory.registered.local(part) as local:
                        await self._reads.read(local, RemoteMemory(memory.address, 0), len(part))
                except DeviceError as error:
                    if self._link.reason is not None:  # another read closed the link and its agent
                        raise LinkClosed(str(self._link.reason)) from error
                    raise NotShared(f"NIXL cannot read this: {error}") from error


class NixlTransport(ControlledTransport):
    """A Transport by the agents of `node`, which must outlive its links."""

    name = "nixl"

    def __init__(
        self,
        secret: Secret,
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
        """Open a link. Raises NoTransport, too, if the peer has no NIXL or cannot be reached by it."""
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
        """Read the peer's nonce: the two agents may be on networks that are not connected."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        # Not by cancelling: a cancelled read is waited for.
        late = asyncio.get_running_loop().call_later(
            self._settings.handshake_timeout_s, link.abort, LinkClosed("nothing was received over it")
        )
        try:
            async with link.connect(self.name) as reply:
                probe = decode_reply(link, NixlProbe.decode, reply)
                view = memoryview(page)[: len(probe.nonce)]
                reader.load_metadata(probe.memory.metadata)
                with reader.memory.registered.local(view) as local:
                    await reads.read(local, RemoteMemory(probe.memory.address, 0), len(view))
                right = view == probe.nonce
        except NotShared as error:
            raise NoTransport(f"no NIXL: {error}") from error
        except CastError as error:
            raise NoTransport(f"no NIXL path to {peer.url}: {error}") from error
        finally:
            late.cancel()
        if not right:
            raise NoTransport(f"the NIXL path to {peer.url} leads to another node")
