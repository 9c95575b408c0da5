"""The fake of the transport seam: nodes of one process, with faults on demand."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rdmacast.destination import writable_bytes
from rdmacast.errors import CastError, LinkClosed, ProtocolError, RegionGone
from rdmacast.have_source import HaveSource, WholeSource
from rdmacast.observer import Observers
from rdmacast.pull_report import PullReport
from rdmacast.transport import Began, Link, PeerAddress, RegionSource
from rdmacast.watching import Heard, Steered, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong with one peer. Counts are over all its links together.

    `corrupt` are offsets whose byte arrives inverted, the first `corrupt_times` reads that cover them.
    """

    refuse: bool = False
    die_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    corrupt: frozenset[int] = frozenset()
    corrupt_times: int = 1


class MemoryNetwork:
    """Peers by address, and the regions they publish."""

    def __init__(self) -> None:
        self._regions: dict[str, dict[str, RegionSource]] = {}
        self._faults: dict[str, Faults] = {}
        self._sent: dict[str, int] = {}
        self._corrupted: dict[tuple[str, int], int] = {}
        self._dead: set[str] = set()
        self._ends: dict[
            object, tuple[str, Callable[[], None]]
        ] = {}  # of links and watches: peer, how to end
        self._observers: defaultdict[str, Observers] = defaultdict(Observers)
        self.stalled = asyncio.Event()  # set when some read first stalls

    def __repr__(self) -> str:
        return f"MemoryNetwork({', '.join(self._regions)})"

    def add(
        self, peer: PeerAddress, regions: Mapping[str, RegionSource], faults: Faults | None = None
    ) -> PeerAddress:
        self._regions[peer.url] = dict(regions)
        self._faults[peer.url] = faults or Faults()
        self._sent[peer.url] = 0
        self._dead.discard(peer.url)
        return peer

    def kill(self, peer: PeerAddress) -> None:
        """Its links and watches end, and it is not reached any more, until it is added again."""
        self._dead.add(peer.url)
        for url, end in tuple(self._ends.values()):
            if url == peer.url:
                end()

    @contextmanager
    def connected(self, url: str, end: Callable[[], None]) -> Iterator[None]:
        """Inside, `end` is called when the peer is killed. Raises LinkClosed if it is dead already."""
        self.check_alive(url)
        key = object()
        self._ends[key] = (url, end)
        try:
            yield
        finally:
            del self._ends[key]

    def check_alive(self, url: str) -> None:
        """Raises LinkClosed if there is no such peer, or not any more."""
        faults = self._faults.get(url)
        if faults is None or faults.refuse or url in self._dead:
            raise LinkClosed(f"cannot connect to {url}")
        if faults.die_after_bytes is not None and self._sent[url] >= faults.die_after_bytes:
            raise LinkClosed(f"{url} died")

    def observers(self, url: str) -> Observers:
        """The casts that a peer observes."""
        return self._observers[url]

    def region(self, url: str, name: str) -> RegionSource:
        try:
            return self._regions[url][name]
        except KeyError:
            raise RegionGone(f"no region {name} at {url}") from None

    async def deliver(self, url: str, source: RegionSource, offset: int, into: memoryview) -> None:
        faults = self._faults[url]
        if faults.stall_after_bytes is not None and self._sent[url] >= faults.stall_after_bytes:
            self.stalled.set()
            await asyncio.get_running_loop().create_future()
        into[:] = source.view(offset, len(into))
        self._sent[url] += len(into)
        for bad in faults.corrupt:
            times = self._corrupted.get((url, bad), 0)
            if offset <= bad < offset + len(into) and times < faults.corrupt_times:
                self._corrupted[url, bad] = times + 1
                into[bad - offset] ^= 0xFF


class MemoryLink:
    """A Link to a peer of the same MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, url: str, name: str) -> None:
        self._network = network
        self._url = url
        self._name = name
        self._reads: set[asyncio.Task[None]] = set()
        self._closed = False
        self._received_bytes = 0

    def __repr__(self) -> str:
        return f"MemoryLink({self._url}, {'closed' if self._closed else 'open'})"

    @property
    def transport(self) -> str:
        return self._name

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        into = writable_bytes(into)
        if self._closed:
            raise LinkClosed("the link was closed")
        reading = asyncio.create_task(self._read(region, offset, into, began))
        self._reads.add(reading)
        try:
            await asyncio.wait({reading})
        finally:
            self._reads.discard(reading)
            reading.cancel()
        if self._closed:
            raise LinkClosed("the link was closed")
        reading.result()
        self._received_bytes += len(into)

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        for reading in self._reads:
            reading.cancel()

    async def _read(self, region: str, offset: int, into: memoryview, began: Began | None) -> None:
        self._network.check_alive(self._url)
        source = self._network.region(self._url, region)
        if offset < 0 or offset + len(into) > source.nbytes:
            raise ProtocolError(f"[{offset}, {offset + len(into)}) is outside region {region}")
        await source.wait_for(offset, len(into))
        if began is not None:
            began()
        await self._network.deliver(self._url, source, offset, into)


class MemoryTransport:
    """Makes MemoryLinks; `name` lets it stand in for a transport that `choose` knows."""

    def __init__(self, network: MemoryNetwork, name: str = "memory") -> None:
        self._network = network
        self._name = name

    def __repr__(self) -> str:
        return f"MemoryTransport({self._name})"

    @property
    def name(self) -> str:
        return self._name

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        link = MemoryLink(self._network, peer.url, self._name)
        with self._network.connected(peer.url, link.close):
            try:
                yield link
            finally:
                link.close()


class MemoryWatch:
    """A watch in a MemoryNetwork: news of one turn of the event loop come as one."""

    def __init__(
        self,
        source: HaveSource,
        block_bytes: int,
        heard: Heard,
        steered: Steered | None,
        observers: Observers,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self._block_bytes = block_bytes
        self._heard = heard
        self._steered = steered
        self._observers = observers
        self._asked = 0
        self._due: asyncio.Handle | None = None
        self._end: asyncio.Future[CastError] = self._loop.create_future()

    def __repr__(self) -> str:
        return f"MemoryWatch({'ended' if self._end.done() else 'open'})"

    def ask(self, number: int) -> None:
        self._asked = number
        self.news()

    def tell(self, report: PullReport) -> None:
        if self._steered is not None and not self._end.done():
            told = PullReport.decode(report.encode())
            self._observers.heard(self, told, self._steered, self._loop.time())

    async def ended(self) -> CastError:
        return await asyncio.shield(self._end)

    def news(self) -> None:
        if self._due is None and not self._end.done():
            self._due = self._loop.call_soon(self._tell)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._observers.forget(self)
        if not self._end.done():
            self._end.set_result(LinkClosed("the watch was closed"))

    def _tell(self) -> None:
        self._due = None
        asked, self._asked = self._asked, 0
        self._heard(self._source.have_map(self._block_bytes), asked)


class MemoryWatcher:
    """Watches regions of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def __repr__(self) -> str:
        return "MemoryWatcher()"

    @asynccontextmanager
    async def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        heard: Heard,
        steered: Steered | None = None,
    ) -> AsyncIterator[Watch]:
        self._network.check_alive(peer.url)
        source = self._network.region(peer.url, region)
        teller = source if isinstance(source, HaveSource) else WholeSource(source)
        watch = MemoryWatch(teller, block_bytes, heard, steered, self._network.observers(peer.url))
        with self._network.connected(peer.url, watch.close), teller.watch(watch.news):
            watch.news()
            try:
                yield watch
            finally:
                watch.close()
