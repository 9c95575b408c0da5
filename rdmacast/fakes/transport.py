"""The fake of the transport seam: nodes of one process, with faults on demand."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rdmacast.cast.watch_link import OnBitfield, OnVerdict, RegionWatch
from rdmacast.destination import writable_bytes
from rdmacast.errors import CastError, LinkClosed, ProtocolError, RegionGone
from rdmacast.protocol.pull_report import PullReport
from rdmacast.server.bitfield_source import BitfieldSource, WholeSource
from rdmacast.stragglers.detector import StragglerDetectors
from rdmacast.transport import Link, OnStart, PeerAddress, RegionSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of one peer. Counts are over all its links together.

    `corrupt` are offsets whose byte arrives inverted, in the first `corrupt_times` reads of them.
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
        self._detectors: defaultdict[str, StragglerDetectors] = defaultdict(StragglerDetectors)
        self.stalled = asyncio.Event()  # set when some read first stalls

    def add(
        self, peer: PeerAddress, regions: Mapping[str, RegionSource], faults: Faults | None = None
    ) -> PeerAddress:
        self._regions[peer.url] = dict(regions)
        self._faults[peer.url] = faults or Faults()
        self._sent[peer.url] = 0
        self._dead.discard(peer.url)
        return peer

    def kill(self, peer: PeerAddress) -> None:
        """End the peer's links and watches; it cannot be reached until it is added again."""
        self._dead.add(peer.url)
        for url, end in tuple(self._ends.values()):
            if url == peer.url:
                end()

    @contextmanager
    def connected(self, url: str, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` if the peer is killed inside. Raises LinkClosed if it is dead already."""
        self.check_alive(url)
        key = object()
        self._ends[key] = (url, end)
        try:
            yield
        finally:
            del self._ends[key]

    def check_alive(self, url: str) -> None:
        """Check that the peer is alive. Raises LinkClosed."""
        faults = self._faults.get(url)
        if faults is None or faults.refuse or url in self._dead:
            raise LinkClosed(f"cannot connect to {url}")
        if faults.die_after_bytes is not None and self._sent[url] >= faults.die_after_bytes:
            raise LinkClosed(f"{url} died")

    def detectors(self, url: str) -> StragglerDetectors:
        """Return the straggler detectors of a peer."""
        return self._detectors[url]

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

    @property
    def transport(self) -> str:
        return self._name

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    @property
    def is_reusable(self) -> bool:
        return not self._closed and not self._reads

    async def read_into(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None = None
    ) -> None:
        into = writable_bytes(into)
        if self._closed:
            raise LinkClosed("the link was closed")
        reading = asyncio.create_task(self._read(region, offset, into, on_start))
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

    async def _read(self, region: str, offset: int, into: memoryview, on_start: OnStart | None) -> None:
        self._network.check_alive(self._url)
        source = self._network.region(self._url, region)
        if offset < 0 or offset + len(into) > source.nbytes:
            raise ProtocolError(f"[{offset}, {offset + len(into)}) is outside region {region}")
        await source.wait_for(offset, len(into))
        if on_start is not None:
            on_start()
        await self._network.deliver(self._url, source, offset, into)


class MemoryTransport:
    """A Transport of MemoryLinks; `name` makes it one that `choose` knows."""

    def __init__(self, network: MemoryNetwork, name: str = "memory") -> None:
        self._network = network
        self._name = name

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
    """A watch in a MemoryNetwork: changes in one iteration of the event loop are reported as one."""

    def __init__(
        self,
        source: BitfieldSource,
        block_bytes: int,
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None,
        detectors: StragglerDetectors,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self._block_bytes = block_bytes
        self._on_bitfield = on_bitfield
        self._on_verdict = on_verdict
        self._detectors = detectors
        self._requested = 0
        self._scheduled: asyncio.Handle | None = None
        self._end: asyncio.Future[CastError] = self._loop.create_future()

    def request_have(self, number: int) -> None:
        self._requested = number
        self.on_change()

    def send_report(self, report: PullReport) -> None:
        if self._on_verdict is not None and not self._end.done():
            reported = PullReport.decode(report.encode())
            self._detectors.on_report(self, reported, self._on_verdict, self._loop.time())

    async def wait_ended(self) -> CastError:
        return await asyncio.shield(self._end)

    def on_change(self) -> None:
        if self._scheduled is None and not self._end.done():
            self._scheduled = self._loop.call_soon(self._notify)

    def close(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._detectors.forget(self)
        if not self._end.done():
            self._end.set_result(LinkClosed("the watch was closed"))

    def _notify(self) -> None:
        self._scheduled = None
        requested, self._requested = self._requested, 0
        self._on_bitfield(self._source.bitfield(self._block_bytes), requested)


class MemoryWatcher:
    """A Watcher of regions in a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    @asynccontextmanager
    async def watch(
        self,
        peer: PeerAddress,
        region: str,
        block_bytes: int,
        on_bitfield: OnBitfield,
        on_verdict: OnVerdict | None = None,
    ) -> AsyncIterator[RegionWatch]:
        self._network.check_alive(peer.url)
        source = self._network.region(peer.url, region)
        bitfields = source if isinstance(source, BitfieldSource) else WholeSource(source)
        watch = MemoryWatch(
            bitfields, block_bytes, on_bitfield, on_verdict, self._network.detectors(peer.url)
        )
        with self._network.connected(peer.url, watch.close), bitfields.watch(watch.on_change):
            watch.on_change()
            try:
                yield watch
            finally:
                watch.close()

    async def prepare(self, peer: PeerAddress) -> None:
        self._network.check_alive(peer.url)

    async def aclose(self) -> None:
        pass
