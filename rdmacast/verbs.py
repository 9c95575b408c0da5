"""Reads by RDMA: straight from the peer's memory into ours; over TCP the peer says when and where.

A read asks for its range as a reader of shared memory does: the peer answers once the bytes are there, and
keeps their memory until it is told that the read has ended.
"""

import asyncio
import logging
import mmap
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from rdmacast.client_link import ClientLink, open_link
from rdmacast.errors import CastError, DeviceError, LinkClosed, NoTransport, NotShared
from rdmacast.settings import LinkSettings
from rdmacast.tcp import writable_bytes
from rdmacast.transport import Began, Link, PeerAddress
from rdmacast.verbs_address import Answering
from rdmacast.verbs_node import VerbsNode
from rdmacast.verbs_reads import ReadQueue
from rdmacast.wire import MAX_READ_BYTES

logger = logging.getLogger(__name__)


class VerbsLink:
    """A Link over one queue pair, controlled over TCP. Either's end is that of both."""

    def __init__(self, link: ClientLink, node: VerbsNode, reads: ReadQueue) -> None:
        self._link = link
        self._node = node
        self._reads = reads
        self._before = reads.received_bytes  # the test's

    def __repr__(self) -> str:
        return f"VerbsLink({self._reads!r}, {self._link!r})"

    @property
    def transport(self) -> str:
        return "verbs"

    @property
    def received_bytes(self) -> int:
        return self._reads.received_bytes - self._before

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        into = writable_bytes(into)
        for start in range(0, len(into), MAX_READ_BYTES):
            part = into[start : start + MAX_READ_BYTES]
            async with self._link.exposed(region, offset + start, len(part)) as remote:
                if began is not None:
                    began()
                try:
                    with self._node.memory.local(part) as local:
                        await self._reads.read(local, remote, len(part))
                except DeviceError as error:
                    raise NotShared(f"our own memory is not for RDMA: {error}") from error

    async def aclose(self) -> None:
        self._reads.close(LinkClosed("the link was closed"))
        await self._link.aclose()


class VerbsTransport:
    """Makes VerbsLinks from `node`, which must outlive them."""

    def __init__(
        self,
        secret: bytes,
        node: VerbsNode,
        *,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
    ) -> None:
        self._secret = secret
        self._node = node
        self._tls = tls
        self._settings = settings or LinkSettings()

    def __repr__(self) -> str:
        return f"VerbsTransport({self._node!r})"

    @property
    def name(self) -> str:
        return "verbs"

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        """Raises NoTransport, too, where the peer has no RDMA or no path leads to it."""
        async with open_link(peer.url, self._secret, self._settings, tls=self._tls) as link:
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
