"""Watches regions of any peer: the connections of watches, of which some stay open for the next ones."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from rdmacast.aio.idle_set import IdleSet
from rdmacast.cast.watch_link import OnBitfield, OnVerdict, RegionWatch, WatchLink, watch_closed
from rdmacast.protocol.connection import dial
from rdmacast.protocol.handshake import Secret
from rdmacast.protocol.wire import SERVICE
from rdmacast.settings import LinkSettings
from rdmacast.transport import PeerAddress
from rdmacast.transports.kept_links import KEPT_S, MAX_KEPT


class RegionWatcher:
    """A Watcher of region servers.

    All watches of a peer share one connection. With `keeps` it stays open without watches: at most MAX_KEPT
    are idle, each for at most KEPT_S; `aclose` closes them.
    """

    def __init__(
        self,
        secret: Secret,
        *,
        tls: ssl.SSLContext | None = None,
        settings: LinkSettings | None = None,
        keeps: bool = False,
    ) -> None:
        self._secret = secret
        self._tls = tls
        self._settings = settings or LinkSettings()
        self._keeps = keeps
        self._links: dict[str, WatchLink] = {}  # the open ones
        self._idle: IdleSet[str] = IdleSet(MAX_KEPT, KEPT_S, self._on_expired)
        self._dialing: dict[str, asyncio.Lock] = {}

    def __repr__(self) -> str:
        return f"RegionWatcher({'TLS' if self._tls else 'no TLS'}, {len(self._links)} connections)"

    @asynccontextmanager
    async def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None = None,
    ) -> AsyncIterator[RegionWatch]:
        link = await self._connected(peer.url)
        watch = link.open(region, block_bytes, on_bitfield, on_verdict)
        self._idle.discard(peer.url)
        try:
            yield watch
        finally:
            link.close(watch)
            await self._release(peer.url, link)

    async def prepare(self, peer: PeerAddress) -> None:
        """Connect to a peer, and keep the connection if this keeps any."""
        if self._keeps:
            await self._release(peer.url, await self._connected(peer.url))

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        for link in tuple(self._links.values()):
            link.abort(watch_closed())
            await link.wait_closed()

    async def _connected(self, url: str) -> WatchLink:
        """Return the open connection to a peer."""
        while True:
            if (known := self._links.get(url)) is not None:
                return known
            lock = self._dialing.setdefault(url, asyncio.Lock())
            if lock.locked():
                async with lock:  # another watch dials; if it fails, this one tries itself
                    continue
            async with lock:
                try:
                    link = await self._dial(url)
                finally:
                    self._dialing.pop(url, None)
                if link.reason is None:
                    self._links[url] = link
                return link

    async def _dial(self, url: str) -> WatchLink:
        return await dial(
            url,
            secret=self._secret,
            service=SERVICE,
            make_protocol=lambda: WatchLink(self._settings, partial(self._on_closed, url)),
            timeout_s=self._settings.handshake_timeout_s,
            tls=self._tls,
        )

    async def _release(self, url: str, link: WatchLink) -> None:
        """Keep a connection without watches, or close it."""
        if link.watches:
            return
        if self._keeps and link.reason is None:
            self._idle.add(url)
        else:
            link.abort(watch_closed())
            await link.wait_closed()

    def _on_expired(self, url: str) -> None:
        self._links[url].abort(watch_closed())

    def _on_closed(self, url: str, link: WatchLink) -> None:
        """Forget a connection that has ended."""
        if self._links.get(url) is link:
            del self._links[url]
            self._idle.discard(url)
