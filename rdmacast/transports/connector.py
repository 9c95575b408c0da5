"""Opens the best link to each peer, and keeps it for as long as it serves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from rdmacast.choose import choose
from rdmacast.errors import CastError, NoTransport
from rdmacast.transport import Choice, Link, PeerAddress, Transport

logger = logging.getLogger(__name__)


class Connector:
    """Opens the best link to a peer from the transports at hand. The choice is logged.

    With `require`, that transport or none. `absent` tells of transports that this node does not have, why.
    """

    def __init__(
        self,
        local_host: str,
        transports: Sequence[Transport],
        require: str | None = None,
        absent: Mapping[str, str] | None = None,
    ) -> None:
        self._local_host = local_host
        self._transports = {transport.name: transport for transport in transports}
        self._require = require
        self._absent = dict(absent or {})

    def __repr__(self) -> str:
        return f"Connector({self._local_host}: {', '.join(self._transports)})"

    def choose(self, peer: PeerAddress, without: Mapping[str, str] | None = None) -> Choice:
        """The best transport but for those in `without`, which tells why. Raises NoTransport."""
        absent = {**self._absent, **(without or {})}
        available = self._transports.keys() - absent.keys()
        return choose(self._local_host, peer, available, self._require, absent)

    @asynccontextmanager
    async def connect(self, peer: PeerAddress, choice: Choice) -> AsyncIterator[Link]:
        """Raises AuthError, LinkClosed, ProtocolError; NoTransport where the choice leads nowhere."""
        logger.info("reading from %s over %s: %s", peer.url, choice.transport, choice.reason)
        async with self._transports[choice.transport].connect(peer) as link:
            yield link


class PeerLinks:
    """The links of one pull or cast: opened when first needed, once for all reads that need them."""

    def __init__(self, connector: Connector, sources: Sequence[PeerAddress], stack: AsyncExitStack) -> None:
        self._connector = connector
        self._sources = sources
        self._stack = stack
        self._locks = [asyncio.Lock() for _ in sources]
        self._links: dict[int, Link] = {}
        self._opened: list[Link] = []
        self._refused: dict[int, CastError] = {}
        self._without: dict[int, dict[str, str]] = {}
        self.choices: dict[str, Choice] = {}

    @property
    def received_bytes(self) -> int:
        """What has come over all links so far, of unfinished blocks too."""
        return sum(link.received_bytes for link in self._opened)

    async def get(self, source: int) -> Link:
        """Raises CastError; whoever asks after a connect that failed hears of it without another one."""
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
            try:
                link = await self._stack.enter_async_context(self._connector.connect(peer, choice))
                break
            except NoTransport as error:
                logger.warning("%s: no %s: %s", peer.url, choice.transport, error)
                without[choice.transport] = str(error)
        self._opened.append(link)
        self.choices[peer.url] = choice
        return link

    def forget(self, source: int, link: Link | None = None) -> None:
        """That link has failed, or none could be made: connect anew next time."""
        self._refused.pop(source, None)
        if link is not None and self._links.get(source) is link:
            del self._links[source]

    def avoid(self, source: int, link: Link) -> None:
        """That link cannot serve the region: connect by another transport next time."""
        if self._links.get(source) is link:
            del self._links[source]
            self._without.setdefault(source, {})[link.transport] = "it cannot serve this region"
