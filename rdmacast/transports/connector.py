"""Opens the best link to each peer, and keeps it while it serves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from rdmacast.errors import CastError, NoTransport
from rdmacast.link_rate import LinkRate
from rdmacast.transport import Link, PeerAddress, Transport, TransportChoice
from rdmacast.transports.choose import choose
from rdmacast.transports.kept_links import KeptLinks

logger = logging.getLogger(__name__)


class Connector:
    """A factory of links, each by the best available transport. The choice is logged.

    With `require`, that transport or none. `absent` has the reasons for transports that this node lacks.
    `port_rate` is the speed of this node's port, None if unknown. Links that are not used any more stay open
    in `kept`, if it is given; `aclose` closes them.
    """

    def __init__(
        self,
        local_host: str,
        transports: Sequence[Transport],
        require: str | None = None,
        absent: Mapping[str, str] | None = None,
        port_rate: LinkRate | None = None,
        kept: KeptLinks | None = None,
    ) -> None:
        self._kept = kept
        self.port_rate = port_rate
        self._local_host = local_host
        self._transports = {transport.name: transport for transport in transports}
        self._require = require
        self._absent = dict(absent or {})

    def __repr__(self) -> str:
        return f"Connector({self._local_host}: {', '.join(self._transports)})"

    def choose(self, peer: PeerAddress, without: Mapping[str, str] | None = None) -> TransportChoice:
        """Return the best transport except those in `without`, which has the reasons. Raises NoTransport."""
        absent = {**self._absent, **(without or {})}
        available = self._transports.keys() - absent.keys()
        return choose(self._local_host, peer, available, self._require, absent)

    @asynccontextmanager
    async def connect(self, peer: PeerAddress, choice: TransportChoice) -> AsyncIterator[Link]:
        """Open a link by the chosen transport.

        Raises PeerAuthError, LinkClosed, ProtocolError; NoTransport where the transport cannot reach the
        peer.
        """
        logger.info("reading from %s over %s: %s", peer.url, choice.transport, choice.reason)
        kept = self._kept.take(peer, choice.transport) if self._kept is not None else None
        link, stack = kept or await self._open(peer, choice)
        try:
            yield link
        finally:
            if self._kept is not None and link.is_reusable:
                self._kept.put(peer, link, stack)
            else:
                await stack.aclose()

    def has_kept(self, peer: PeerAddress, choice: TransportChoice) -> bool:
        """Return whether `connect` would use a kept link, which may have broken unnoticed."""
        return self._kept is not None and self._kept.has(peer, choice.transport)

    async def prepare(self, peer: PeerAddress) -> None:
        """Open a link to a peer and keep it, unless one is kept. Raises as `connect` does."""
        choice = self.choose(peer)
        if self._kept is not None and not self.has_kept(peer, choice):
            self._kept.put(peer, *await self._open(peer, choice))

    async def aclose(self) -> None:
        """Close the links that are kept."""
        if self._kept is not None:
            await self._kept.aclose()

    async def _open(self, peer: PeerAddress, choice: TransportChoice) -> tuple[Link, AsyncExitStack]:
        stack = AsyncExitStack()
        link = await stack.enter_async_context(self._transports[choice.transport].connect(peer))
        return link, stack


class PeerLinks:
    """The links of one pull or cast: opened when first needed, one for all concurrent reads."""

    def __init__(self, connector: Connector, sources: Sequence[PeerAddress], stack: AsyncExitStack) -> None:
        self._connector = connector
        self._sources = sources
        self._stack = stack
        self._locks = [asyncio.Lock() for _ in sources]
        self._links: dict[int, Link] = {}
        self._refused: dict[int, CastError] = {}
        self._without: dict[int, dict[str, str]] = {}
        self._unproven: set[Link] = set()  # kept links that have served nothing yet
        self.choices: dict[str, TransportChoice] = {}

    async def get(self, source: int) -> Link:
        """Return the link to a source. Raises CastError; concurrent callers share one failed connect."""
        if (link := self._links.get(source)) is not None:
            return link
        async with self._locks[source]:
            if source in self._refused:
                refused = self._refused[source]
                raise type(refused)(str(refused))
            if source not in self._links:
                try:
                    self._links[source] = await self._connect(source)
                except CastError as error:
                    self._refused[source] = error
                    raise
            return self._links[source]

    async def _connect(self, source: int) -> Link:
        peer = self._sources[source]
        without = self._without.setdefault(source, {})
        while True:
            choice = self._connector.choose(peer, without)
            is_kept = self._connector.has_kept(peer, choice)
            try:
                link = await self._stack.enter_async_context(self._connector.connect(peer, choice))
                break
            except NoTransport as error:
                logger.warning("%s: no %s: %s", peer.url, choice.transport, error)
                without[choice.transport] = str(error)
        if is_kept:
            self._unproven.add(link)
        self.choices[peer.url] = choice
        return link

    def confirm(self, link: Link) -> None:
        """Note that a link has served a read."""
        self._unproven.discard(link)

    def drop_if_stale(self, source: int, link: Link) -> bool:
        """Drop a kept link that closed before it served any read: it broke unnoticed, and not by this use.

        Returns whether it was such a link, for each of its reads: they should be sent over another one.
        """
        if link not in self._unproven:
            return False
        self._drop(source, link)
        return True

    def forget(self, source: int, link: Link | None = None) -> None:
        """Drop a link that has failed, or a failed connect: the next call connects again."""
        self._refused.pop(source, None)
        if link is not None:
            self._drop(source, link)

    def avoid(self, source: int, link: Link) -> None:
        """Drop a link that cannot serve the region: the next call connects by another transport."""
        if self._drop(source, link):
            self._without.setdefault(source, {})[link.transport] = "it cannot serve this region"

    def _drop(self, source: int, link: Link) -> bool:
        """Drop the link to a source; returns False if another read has dropped it before."""
        if self._links.get(source) is not link:
            return False
        del self._links[source]
        return True
