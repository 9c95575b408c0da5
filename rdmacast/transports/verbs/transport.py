"""Reads by RDMA: straight from the peer's memory into ours, controlled over TCP.

The peer exports a range once its bytes are present and keeps their memory until the read has ended.
"""

import asyncio
import mmap
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from rdmacast.destination import writable_parts
from rdmacast.errors import CastError, DeviceError, LinkClosed, NoTransport, NotShared
from rdmacast.protocol.client_link import ClientLink
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.wire import MAX_READ_BYTES
from rdmacast.settings import LinkSettings
from rdmacast.transport import Link, OnStart, PeerAddress
from rdmacast.transports.controlled import ControlledTransport, decode_reply
from rdmacast.transports.queued_link import QueuedLink
from rdmacast.transports.verbs.address import QueuePairReply, RemoteMemory
from rdmacast.transports.verbs.node import VerbsNode
from rdmacast.transports.verbs.reads import ReadQueue


class VerbsLink(QueuedLink):
    """A Link over one queue pair, controlled over TCP."""

    transport = "verbs"

    def __init__(self, link: ClientLink, node: VerbsNode, reads: ReadQueue) -> None:
        super().__init__(link, reads)
        self._node = node

    @property
    def is_reusable(self) -> bool:
        return self._link.is_idle

    async def read_into(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None = None
    ) -> None:
        for start, part in writable_parts(into, MAX_READ_BYTES):
            async with self._link.export(self.transport, region, offset + start, len(part)) as reply:
                remote = decode_reply(self._link, RemoteMemory.decode, reply)
                if on_start is not None:
                    on_start()
                try:
                    with self._node.memory.local(part) as local:
                        await self._node.read(self._reads, local, remote, part)
                except DeviceError as error:
                    raise NotShared(f"our own memory cannot be registered for RDMA: {error}") from error


class VerbsTransport(ControlledTransport):
    """A Transport by the device of `node`, which must outlive its links."""

    name = "verbs"

    def __init__(
        self,
        secret: Secret,
        node: VerbsNode,
        *,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        super().__init__(secret, tls, settings)
        self._node = node

    def __repr__(self) -> str:
        return f"VerbsTransport({self._node!r})"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        """Open a link. Raises NoTransport, too, if the peer has no RDMA or cannot be reached by it."""
        async with self._control(peer) as link:
            reads, reply = await self._connect(link)
            try:
                await self._probe(reads, reply, peer)
                verbs = VerbsLink(link, self._node, reads)
                yield verbs
                await verbs.aclose()
            finally:
                reads.close(LinkClosed("the link was closed"))

    async def _connect(self, link: ClientLink) -> tuple[ReadQueue, QueuePairReply]:
        device = self._node.device
        with ExitStack() as undo:
            try:
                pair = self._node.queue_pair()
                undo.callback(self._node.close_pair, pair)
                async with link.connect(self.name, pair.address.encode()) as payload:
                    reply = decode_reply(link, QueuePairReply.decode, payload)
                pair.connect(reply.address)
            except (DeviceError, NotShared) as error:
                raise NoTransport(f"no RDMA: {error}") from error
            reads = ReadQueue(pair, device.depth, device.message_bytes, link.abort)
            link.on_closed(lambda reason: reads.close(LinkClosed(str(reason))))
            undo.pop_all()
        return reads, reply

    async def _probe(self, reads: ReadQueue, reply: QueuePairReply, peer: PeerAddress) -> None:
        """Read the peer's nonce: two ports may be on networks that are not connected."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        nbytes = len(reply.nonce)
        view = memoryview(page)[:nbytes]
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                with self._node.memory.local(view) as local:
                    await self._node.read(reads, local, reply.probe, view)
        except (CastError, TimeoutError) as error:
            raise NoTransport(f"no RDMA path from {self._node.name} to {peer.url}: {error}") from error
        if view != reply.nonce:
            raise NoTransport(f"the RDMA path to {peer.url} leads to another node")
