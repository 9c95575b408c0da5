"""The transport over TCP: withdrawals while it sends, link rates, and peers that fall silent."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from rdmacast.errors import LinkClosed
from rdmacast.fakes.exporter import MemoryExporter
from rdmacast.protocol.client_link import ClientLink
from rdmacast.protocol.connection import dial, listen
from rdmacast.protocol.frames import Frame, Greeting, Read, TransportReply
from rdmacast.protocol.framing import MAX_UNSENT_BYTES, CastProtocol
from rdmacast.protocol.wire import MAX_OFFSET, MAX_REGION_BYTES, SERVICE, encode
from rdmacast.server.exporter_registry import ExporterRegistry
from rdmacast.server.port_arbiter import PortArbiter
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.server.region_table import RegionTable
from rdmacast.server.server_link import LinkEvents, ServerContext, ServerLink
from rdmacast.settings import LinkSettings
from rdmacast.stragglers.detector import StragglerDetectors
from rdmacast.transport import Link, PeerAddress
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.transport import CONTENT, SECRET, WatchedRegion, make_rig


async def test_a_reads_lease_holds_the_withdrawal_until_its_bytes_are_sent() -> None:
    """A reader that stops reading holds the region; past the drain time its link is closed."""
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


async def test_a_withdrawal_waits_for_a_read_that_is_being_sent() -> None:
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


async def test_the_link_rate_caps_a_node_and_links_share_it() -> None:
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


async def test_the_receiving_side_caps_too() -> None:
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


class _Hasty(ClientLink):
    """Its task is cancelled at the moment at which what it asked for is granted."""

    task: "asyncio.Task[None]"

    def frame_received(self, frame: Frame) -> None:
        super().frame_received(frame)
        if isinstance(frame, TransportReply):
            self.task.cancel()


async def test_a_grant_to_who_is_cancelled_at_that_moment_goes_back() -> None:
    """The region's withdrawal would wait for it, and then close the link."""
    async with RegionServer(SECRET, host="a", exporters=[MemoryExporter()]) as server:
        server.publish("image", GrowingRegion(CONTENT, complete=True))
        link = await dial(
            server.address.url,
            secret=SECRET,
            service=SERVICE,
            make_protocol=lambda: _Hasty(LinkSettings()),
            timeout_s=PATIENCE_S,
        )

        async def read() -> None:
            async with link.export("memory", "image", 0, 10):
                raise AssertionError("it was cancelled before")

        link.task = asyncio.create_task(read())
        await asyncio.wait([link.task])
        assert link.task.cancelled()
        server.publish("other", GrowingRegion(CONTENT, complete=True))
        await server.withdraw("image", drain_s=PATIENCE_S)
        await link.read("other", 0, memoryview(bytearray(10)))
        await link.aclose()


class _Deaf(asyncio.Protocol):
    """A server that greets and then never says anything again."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(encode(Greeting(1 << 20, "a")))


async def test_a_peer_that_falls_silent_is_given_up() -> None:
    settings = LinkSettings(ping_interval_s=0.05, ping_timeout_s=0.2)
    listener = await listen(
        "tcp://127.0.0.1:0", secret=SECRET, service=SERVICE, make_protocol=_Deaf, timeout_s=PATIENCE_S
    )
    peer = PeerAddress(url=listener.endpoint.url, host="a")
    async with TcpTransport(SECRET, settings=settings).connect(peer) as link:
        with pytest.raises(LinkClosed, match="silent"):
            await link.read_into("image", 0, memoryview(bytearray(10)))
    listener.close()


async def test_a_link_that_is_closed_while_bytes_wait_in_it_ends_once() -> None:
    """Its peer hangs up, and takes what was sent before afterwards."""
    async with asyncio.timeout(PATIENCE_S):
        loop, faults, nbytes = asyncio.get_running_loop(), list[dict[str, object]](), 8 << 20
        loop.set_exception_handler(lambda _, context: faults.append(context))
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        with theirs:
            _, protocol = await loop.connect_accepted_socket(lambda: CastProtocol(LinkSettings()), ours)
            transport = protocol.transport
            transport.write(bytes(nbytes))
            theirs.shutdown(socket.SHUT_WR)
            await until(transport.is_closing)
            while nbytes:
                nbytes -= len(await loop.sock_recv(theirs, nbytes))
            await protocol.wait_closed()
            assert await loop.sock_recv(theirs, 1) == b""
        await asyncio.sleep(0)  # what it has put off is done
        assert faults == []


class _Mute(asyncio.Protocol):
    """A client that reads nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.pause_reading()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_peer_that_asks_without_end_and_reads_nothing_is_given_up(busy: bool) -> None:
    """Between payloads its answers would fill the transport's buffer, within one a list of frames."""
    closed: asyncio.Future[ServerLink] = asyncio.get_running_loop().create_future()
    table, name = RegionTable(), "n" * MAX_REGION_BYTES
    table.publish(name, GrowingRegion(bytes(64 << 20), complete=True))
    context = ServerContext(
        table=table,
        host="a",
        settings=LinkSettings(),
        pacer=None,
        arbiter=PortArbiter(),
        exporters=ExporterRegistry([]),
        detectors=StragglerDetectors(),
    )
    events = LinkEvents(on_open=lambda _: None, on_close=closed.set_result, on_sent=lambda _: None)

    listener = await listen(
        "tcp://127.0.0.1:0",
        secret=SECRET,
        service=SERVICE,
        make_protocol=lambda: ServerLink(context, events),
        timeout_s=PATIENCE_S,
    )
    url = listener.endpoint.url
    peer = await dial(url, secret=SECRET, service=SERVICE, make_protocol=_Mute, timeout_s=PATIENCE_S)
    if busy:
        peer.transport.write(encode(Read(1, name, 0, 64 << 20)))
    # Errors of some 200 bytes: more than are kept, and the kernel's buffers take some megabytes beside.
    for id_ in range(2, 2 + 2 * MAX_UNSENT_BYTES // 200):
        peer.transport.write(encode(Read(id_, name, MAX_OFFSET, 1)))
        if id_ % 1000 == 0:
            await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        link = await closed
        assert "unread" in str(link.reason)
        peer.transport.abort()
        await link.finished()
    listener.close()


@pytest.mark.parametrize("capped", ["server", "client"])
async def test_a_payload_may_take_longer_than_a_peer_may_be_silent(capped: str) -> None:
    limits = LinkSettings(ping_interval_s=0.05, ping_timeout_s=0.2)
    rate = 300_000.0
    server_rate, client_rate = (rate, None) if capped == "server" else (None, rate)
    async with RegionServer(SECRET, host="a", link_rate_bytes_s=server_rate, settings=limits) as server:
        server.publish("image", GrowingRegion(CONTENT, complete=True))
        transport = TcpTransport(SECRET, link_rate_bytes_s=client_rate, settings=limits)
        async with transport.connect(server.address) as link:
            buffer = bytearray(200_000)
            await link.read_into("image", 0, memoryview(buffer))
            assert buffer == CONTENT[:200_000]


async def test_pings_keep_a_link_that_waits_long(tmp_path: Path) -> None:
    settings = LinkSettings(ping_interval_s=0.05, ping_timeout_s=0.2)
    async with make_rig("tcp", tmp_path, settings) as rig:
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, rig.region.complete)
        await rig.link.read_into("image", 0, memoryview(bytearray(10)))
