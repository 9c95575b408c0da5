"""One contract for every transport, then what each adds: real sockets, real files."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop

from rdmacast.connection import listen
from rdmacast.errors import AuthError, CastError, LinkClosed, NotShared, ProtocolError, RegionGone
from rdmacast.memory_transport import MemoryNetwork, MemoryTransport
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.transport import Link, PeerAddress, Transport
from rdmacast.wire import SERVICE, Hello, encode
from tests.patience import PATIENCE_S

SECRET = b"a secret of the cluster"
NBYTES = 3_000_000
CONTENT = bytes(os.urandom(NBYTES))


class WatchedRegion(GrowingRegion):
    """Says when somebody has to wait for it, and when somebody was given its bytes."""

    def __init__(self, content: bytes, *, shm_path: str | None = None, complete: bool = False) -> None:
        super().__init__(content, shm_path=shm_path, complete=complete)
        self.awaited = asyncio.Event()
        self.viewed = asyncio.Event()

    def view(self, offset: int, nbytes: int) -> memoryview:
        self.viewed.set()
        return super().view(offset, nbytes)

    async def wait_for(self, offset: int, nbytes: int) -> None:
        if not self.is_complete:
            self.awaited.set()
        await super().wait_for(offset, nbytes)


@dataclass(frozen=True, slots=True)
class Rig:
    """A peer that serves `region` (nothing of it marked yet) as "image", and a link to it."""

    region: WatchedRegion
    link: Link
    transport: Transport
    peer: PeerAddress
    withdraw: Callable[[], Awaitable[None]] | None


@asynccontextmanager
async def make_rig(kind: str, folder: Path, settings: LinkSettings | None = None) -> AsyncIterator[Rig]:
    path = folder / "image"
    path.write_bytes(CONTENT)
    region = WatchedRegion(CONTENT, shm_path=str(path))
    if kind == "memory":
        network = MemoryNetwork()
        peer = network.add(PeerAddress(url="tcp://peer:1", host="a"), {"image": region})
        memory = MemoryTransport(network)
        async with memory.connect(peer) as link:
            yield Rig(region, link, memory, peer, None)
        return
    async with RegionServer(SECRET, host="a", settings=settings) as server:
        server.publish("image", region)
        transport: Transport
        if kind == "shm":
            transport = ShmTransport(SECRET, root=folder, settings=settings)
        else:
            transport = TcpTransport(SECRET, settings=settings)
        async with transport.connect(server.address) as link:
            yield Rig(region, link, transport, server.address, lambda: server.withdraw("image"))


KINDS = ["memory", "shm", "tcp", "tcp-uvloop", "shm-uvloop"]


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Rig], Awaitable[None]]], None]:
    kind, _, loop = request.param.partition("-")

    async def rigged(body: Callable[[Rig], Awaitable[None]]) -> None:
        async with make_rig(kind, tmp_path) as rig:
            async with asyncio.timeout(PATIENCE_S):
                await body(rig)

    def runner(body: Callable[[Rig], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop else None) as event_loop:
            event_loop.run(rigged(body))

    return runner


Run = Callable[[Callable[[Rig], Awaitable[None]]], None]


def test_reads_land_where_they_belong(run: Run) -> None:
    async def body(rig: Rig) -> None:
        rig.region.complete()
        buffer = bytearray(NBYTES)
        view = memoryview(buffer)
        cuts = [0, 1, 17, 65_536, 262_144, 1_500_000, NBYTES]
        await asyncio.gather(
            *(rig.link.read_into("image", start, view[start:end]) for start, end in pairwise(cuts))
        )
        assert buffer == CONTENT
        await rig.link.read_into("image", 5, memoryview(bytearray()))

    run(body)


def test_a_read_waits_for_its_bytes_and_others_overtake_it(run: Run) -> None:
    async def body(rig: Rig) -> None:
        late, early = bytearray(1000), bytearray(2000)
        rig.region.mark(0, 2000)
        waiting = asyncio.create_task(rig.link.read_into("image", 5000, memoryview(late)))
        await rig.region.awaited.wait()
        await rig.link.read_into("image", 0, memoryview(early))
        assert early == CONTENT[:2000] and not waiting.done()
        rig.region.mark(5000, 500)
        assert not waiting.done()
        rig.region.mark(5500, 500)
        await waiting
        assert late == CONTENT[5000:6000]

    run(body)


def test_a_region_that_fails_or_is_not_there_is_gone(run: Run) -> None:
    async def body(rig: Rig) -> None:
        buffer = memoryview(bytearray(100))
        with pytest.raises(RegionGone):
            await rig.link.read_into("another", 0, buffer)
        waiting = asyncio.create_task(rig.link.read_into("image", 0, buffer))
        await rig.region.awaited.wait()
        rig.region.fail(OSError("the disk is gone"))
        with pytest.raises(RegionGone, match="the disk is gone"):
            await waiting
        with pytest.raises(RegionGone):
            await rig.link.read_into("image", 0, buffer)

    run(body)


def test_a_range_outside_the_region_is_a_protocol_error_and_the_link_lives(run: Run) -> None:
    async def body(rig: Rig) -> None:
        rig.region.complete()
        with pytest.raises(ProtocolError, match="outside"):
            await rig.link.read_into("image", NBYTES - 10, memoryview(bytearray(11)))
        buffer = bytearray(10)
        await rig.link.read_into("image", NBYTES - 10, memoryview(buffer))
        assert buffer == CONTENT[-10:]
        with pytest.raises(ValueError, match="read-only"):
            await rig.link.read_into("image", 0, memoryview(b"xy"))

    run(body)


def test_after_cancellation_nothing_is_written_and_the_link_lives(run: Run) -> None:
    async def body(rig: Rig) -> None:
        buffer = bytearray(1_000_000)
        waiting = asyncio.create_task(rig.link.read_into("image", 0, memoryview(buffer)))
        await rig.region.awaited.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        rig.region.complete()
        # Cancelled at every stage of its way: asked for, being sent, arriving.
        for steps in range(40):
            reading = asyncio.create_task(rig.link.read_into("image", 0, memoryview(buffer)))
            for _ in range(steps):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
            buffer[:] = bytes(len(buffer))
            small = bytearray(70_000)
            await rig.link.read_into("image", 1_500_000, memoryview(small))
            assert small == CONTENT[1_500_000:1_570_000]
            assert not any(buffer)

    run(body)


def test_closing_ends_reads_and_the_link_stays_closed(run: Run) -> None:
    async def body(rig: Rig) -> None:
        waiting = asyncio.create_task(rig.link.read_into("image", 0, memoryview(bytearray(10))))
        await rig.region.awaited.wait()
        await rig.link.aclose()
        with pytest.raises(LinkClosed):
            await waiting
        with pytest.raises(LinkClosed):
            await rig.link.read_into("image", 0, memoryview(bytearray(10)))
        await rig.link.aclose()

    run(body)


def test_a_withdrawn_region_is_gone_for_who_waits(run: Run) -> None:
    async def body(rig: Rig) -> None:
        if rig.withdraw is None:
            return
        waiting = asyncio.create_task(rig.link.read_into("image", 0, memoryview(bytearray(10))))
        await rig.region.awaited.wait()
        await rig.withdraw()
        with pytest.raises(RegionGone, match="withdrawn"):
            await waiting
        with pytest.raises(RegionGone, match="no region"):
            await rig.link.read_into("image", 0, memoryview(bytearray(10)))

    run(body)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_another_secret_is_refused(kind: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with RegionServer(SECRET, host="a") as server:
            transport: Transport = ShmTransport(b"other") if kind == "shm" else TcpTransport(b"other")
            with pytest.raises(AuthError):
                async with transport.connect(server.address):
                    pass

    asyncio.run(main())


def test_a_reads_lease_holds_the_withdrawal_until_its_bytes_are_sent() -> None:
    """A reader that stops reading holds the region; past the drain time its link is closed."""

    async def main() -> None:
        nbytes = 32 << 20
        async with RegionServer(SECRET, host="a") as server:
            region = WatchedRegion(bytes(nbytes), complete=True)
            server.publish("image", region)
            # A receiving cap this low leaves the payload in the server's hands for minutes.
            slow = TcpTransport(SECRET, link_rate_bytes_s=50_000)
            async with slow.connect(server.address) as link:
                reading = asyncio.create_task(link.read_into("image", 0, memoryview(bytearray(nbytes))))
                await region.viewed.wait()
                with pytest.raises(ValueError, match="published"):
                    server.publish("image", GrowingRegion(b"x"))
                await server.withdraw("image", drain_s=0.05)
                assert server.counters["cast_sent_bytes"] < nbytes
                assert "0 regions, 0 links" in repr(server)
            with pytest.raises(LinkClosed):
                await reading
            await server.withdraw("image")

    asyncio.run(main())


def test_a_withdrawal_waits_for_a_read_that_is_being_sent() -> None:
    async def main() -> None:
        nbytes = 8 << 20
        content = os.urandom(nbytes)
        async with RegionServer(SECRET, host="a") as server:
            region = WatchedRegion(content, complete=True)
            server.publish("image", region)
            async with TcpTransport(SECRET).connect(server.address) as link:
                buffer = bytearray(nbytes)
                reading = asyncio.create_task(link.read_into("image", 0, memoryview(buffer)))
                await region.viewed.wait()
                await server.withdraw("image")
                assert server.counters["cast_sent_bytes"] == nbytes
                await reading
                assert buffer == content

    asyncio.run(main())


def test_the_link_rate_caps_a_node_and_links_share_it() -> None:
    async def main() -> None:
        nbytes, rate = 400_000, 2_000_000
        loop = asyncio.get_running_loop()
        async with RegionServer(SECRET, host="a", link_rate_bytes_s=rate) as server:
            server.publish("image", GrowingRegion(b"x" * nbytes, complete=True))
            transport = TcpTransport(SECRET)
            async with transport.connect(server.address) as one, transport.connect(server.address) as two:
                buffers, had = (bytearray(nbytes), bytearray(nbytes)), list[int]()

                async def read(link: Link, buffer: bytearray) -> None:
                    await link.read_into("image", 0, memoryview(buffer))
                    had.append(min(other.count(b"x") for other in buffers))

                started_s = loop.time()
                await asyncio.gather(read(one, buffers[0]), read(two, buffers[1]))
                assert loop.time() - started_s >= (2 * nbytes - 100_000) / rate
                assert had[0] > nbytes / 2  # when the one was through the other was not far behind

    asyncio.run(main())


def test_the_receiving_side_caps_too() -> None:
    async def main() -> None:
        nbytes, rate = 300_000, 2_000_000
        loop = asyncio.get_running_loop()
        async with RegionServer(SECRET, host="a") as server:
            server.publish("image", GrowingRegion(CONTENT[:nbytes], complete=True))
            async with TcpTransport(SECRET, link_rate_bytes_s=rate).connect(server.address) as link:
                buffer = bytearray(nbytes)
                started_s = loop.time()
                await link.read_into("image", 0, memoryview(buffer))
                assert loop.time() - started_s >= (nbytes - 100_000) / rate
                assert buffer == CONTENT[:nbytes]

    asyncio.run(main())


class _Deaf(asyncio.Protocol):
    """A server that greets and then never says anything again."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(encode(Hello(1 << 20, "a")))


def test_a_peer_that_falls_silent_is_given_up() -> None:
    settings = LinkSettings(ping_interval_s=0.05, ping_timeout_s=0.2)

    async def main() -> None:
        listener = await listen(
            "tcp://127.0.0.1:0", secret=SECRET, service=SERVICE, make_protocol=_Deaf, timeout_s=PATIENCE_S
        )
        peer = PeerAddress(url=listener.endpoint.url, host="a")
        async with TcpTransport(SECRET, settings=settings).connect(peer) as link:
            with pytest.raises(LinkClosed, match="silent"):
                await link.read_into("image", 0, memoryview(bytearray(10)))
        listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("capped", ["server", "client"])
def test_a_payload_may_take_longer_than_a_peer_may_be_silent(capped: str) -> None:
    limits = LinkSettings(ping_interval_s=0.05, ping_timeout_s=0.2)
    rate = 300_000.0

    async def main() -> None:
        server_rate, client_rate = (rate, None) if capped == "server" else (None, rate)
        async with RegionServer(SECRET, host="a", link_rate_bytes_s=server_rate, settings=limits) as server:
            server.publish("image", GrowingRegion(CONTENT, complete=True))
            transport = TcpTransport(SECRET, link_rate_bytes_s=client_rate, settings=limits)
            async with transport.connect(server.address) as link:
                buffer = bytearray(200_000)
                await link.read_into("image", 0, memoryview(buffer))
                assert buffer == CONTENT[:200_000]

    asyncio.run(main())


def test_pings_keep_a_link_that_waits_long(tmp_path: Path) -> None:
    settings = LinkSettings(ping_interval_s=0.05, ping_timeout_s=0.2)

    async def main() -> None:
        async with make_rig("tcp", tmp_path, settings) as rig:
            loop = asyncio.get_running_loop()
            loop.call_later(0.5, rig.region.complete)
            await rig.link.read_into("image", 0, memoryview(bytearray(10)))

    asyncio.run(main())


@pytest.mark.parametrize("trick", ["link", "outside", "size", "folder", "missing", "none", "relative"])
def test_shm_opens_only_what_it_may(trick: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    content = CONTENT[:1000]
    good = root / "good"
    good.write_bytes(content)
    (root / "folder").mkdir()
    (root / "link").symlink_to(good)
    (tmp_path / "outside").write_bytes(content)
    (root / "size").write_bytes(content + b"x")
    paths = {
        "link": root / "link",
        "outside": tmp_path / "outside",
        "size": root / "size",
        "folder": root / "folder",
        "missing": root / "missing",
        "none": None,
        "relative": Path("good"),
    }

    async def main() -> None:
        async with RegionServer(SECRET, host="a") as server:
            path = paths[trick]
            shm_path = str(path) if path else None
            server.publish("bad", GrowingRegion(content, shm_path=shm_path, complete=True))
            server.publish("good", GrowingRegion(content, shm_path=str(good), complete=True))
            async with ShmTransport(SECRET, root=root).connect(server.address) as link:
                with pytest.raises(NotShared):
                    await link.read_into("bad", 0, memoryview(bytearray(1000)))
                buffer = bytearray(1000)
                await link.read_into("good", 0, memoryview(buffer))
                assert buffer == content

    asyncio.run(main())


def test_shm_follows_a_region_that_is_published_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with RegionServer(SECRET, host="a") as server:
            async with ShmTransport(SECRET).connect(server.address) as link:
                for content in (b"one" * 100, b"two" * 100):
                    path = tmp_path / content[:3].decode()
                    path.write_bytes(content)
                    server.publish("image", GrowingRegion(content, shm_path=str(path), complete=True))
                    buffer = bytearray(300)
                    await link.read_into("image", 0, memoryview(buffer))
                    assert buffer == content
                    await server.withdraw("image")

    asyncio.run(main())


def test_shm_refuses_a_server_that_is_on_another_host() -> None:
    async def main() -> None:
        async with RegionServer(SECRET, host="b") as server:
            with pytest.raises(CastError, match="on host 'b'"):
                async with ShmTransport(SECRET).connect(PeerAddress(url=server.address.url, host="a")):
                    pass

    asyncio.run(main())


def test_a_shortened_file_reads_short_and_does_not_kill(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(CONTENT)

    async def main() -> None:
        async with RegionServer(SECRET, host="a") as server:
            server.publish("image", GrowingRegion(CONTENT, shm_path=str(path), complete=True))
            async with ShmTransport(SECRET).connect(server.address) as link:
                buffer = memoryview(bytearray(NBYTES))
                await link.read_into("image", 0, buffer)
                os.truncate(path, 1000)
                with pytest.raises(NotShared, match="ends at 1000"):
                    await link.read_into("image", 0, buffer)

    asyncio.run(main())
