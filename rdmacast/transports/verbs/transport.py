"""Reads by RDMA: straight from the peer's memory into ours; over TCP the peer says when and where.

A read asks for its range as a reader of shared memory does: the peer answers once the bytes are there, and
keeps their memory until it is told that the read has ended.
"""

import asyncio
import mmap
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from rdmacast.client_link import ClientLink
from rdmacast.controlled import ControlledTransport
from rdmacast.destination import writable_parts
from rdmacast.errors import CastError, DeviceError, LinkClosed, NoTransport, NotShared
from rdmacast.queued_link import QueuedLink
from rdmacast.settings import LinkSettings
from rdmacast.transport import Began, Link, PeerAddress
from rdmacast.verbs_address import Answering
from rdmacast.verbs_node import VerbsNode
from rdmacast.verbs_reads import ReadQueue
from rdmacast.wire import MAX_READ_BYTES


class VerbsLink(QueuedLink):
    """A Link over one queue pair, controlled over TCP."""

    transport = "verbs"

    def __init__(self, link: ClientLink, node: VerbsNode, reads: ReadQueue) -> None:
        super().__init__(link, reads)
        self._node = node

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        for start, part in writable_parts(into, MAX_READ_BYTES):
            async with self._link.exposed(region, offset + start, len(part)) as remote:
                if began is not None:
                    began()
                try:
                    with self._node.memory.local(part) as local:
                        await self._reads.read(local, remote, len(part))
                except DeviceError as error:
                    raise NotShared(f"our own memory is not for RDMA: {error}") from error


class VerbsTransport(ControlledTransport):
    """Makes VerbsLinks from `node`, which must outlive them."""

    name = "verbs"

    def __init__(
        self,
        secret: bytes,
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
        """Raises NoTransport, too, where the peer has no RDMA or no path leads to it."""
        async with self._control(peer) as link:
            reads, answering = await self._pair(link)
            try:
                await self._probe(link, reads, answering, peer)
                verbs = VerbsLink(link, self._node, reads)
                yield verbs
                await verbs.aclose()
            finally:
                reads.close(LinkClosed("the link was closed"))

    async def _pair(self, link: ClientLink) -> tuple[ReadQueue, Answering]:
        device = self._node.device
        with ExitStack() as undo:
            try:
                pair = device.queue_pair()
                undo.callback(pair.close)
                answering = await link.pair(pair.address)
                pair.connect(answering.address)
            except (DeviceError, NotShared) as error:
                raise NoTransport(f"no RDMA: {error}") from error
            reads = ReadQueue(pair, device.depth, device.message_bytes, link.abort)
            link.on_closed(lambda reason: reads.close(LinkClosed(str(reason))))
            undo.pop_all()
        return reads, answering

    async def _probe(
        self, link: ClientLink, reads: ReadQueue, answering: Answering, peer: PeerAddress
    ) -> None:
        """Read what only this peer can give: two ports may be of networks that do not meet."""
        page = mmap.mmap(-1, mmap.PAGESIZE)
        nbytes = len(answering.nonce)
        view = memoryview(page)[:nbytes]
        try:
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                with self._node.memory.local(view) as local:
                    await reads.read(local, answering.probe, nbytes)
        except (CastError, TimeoutError) as error:
            raise NoTransport(f"no RDMA path from {self._node.name} to {peer.url}: {error}") from error
        if view != answering.nonce:
            raise NoTransport(f"the RDMA path to {peer.url} leads to another node")
