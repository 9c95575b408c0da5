"""TLS between nodes: who is let in, and casts within it."""

import asyncio
import ssl
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.errors import LinkClosed
from rdmacast.protocol.connection import MAX_HANDSHAKES, ConnectionListener, dial, listen
from rdmacast.protocol.handshake import Service
from rdmacast.protocol.tls import load_tls
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import Transport
from rdmacast.transports.connector import Connector
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.loops import on_both_loops
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.pulls import pull
from tests.fixtures.tls import issue, seconds_until_hung_up_on, tls_of_nodes
from tests.fixtures.transport import CONTENT, NBYTES, SECRET


class Noted(asyncio.Protocol):
    """One end of a connection that was let in."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.grown = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.grown.set()


class Ends:
    """The listener's ends of connections that were let in; who dialled may know of one before."""

    def __init__(self) -> None:
        self.made: list[Noted] = []
        self._more = asyncio.Event()

    def make(self) -> Noted:
        self.made.append(Noted())
        self._more.set()
        return self.made[-1]

    async def there(self, count: int) -> list[Noted]:
        while len(self.made) < count:
            self._more.clear()
            await self._more.wait()
        return self.made


async def listening(ends: Ends, timeout_s: float = PATIENCE_S) -> ConnectionListener:
    return await listen(
        "tcp://127.0.0.1:0",
        secret=SECRET,
        service=Service("test", 1),
        make_protocol=ends.make,
        timeout_s=timeout_s,
        tls=tls_of_nodes().server,
    )


async def dialled(listener: ConnectionListener) -> Noted:
    return await dial(
        listener.endpoint.url,
        secret=SECRET,
        service=Service("test", 1),
        make_protocol=Noted,
        timeout_s=PATIENCE_S,
        tls=tls_of_nodes().client,
    )


@on_both_loops
async def test_connections_that_do_not_finish_tls_are_counted_and_the_oldest_give_way() -> None:
    ends = Ends()
    listener = await listening(ends)
    silent = [
        await asyncio.open_connection(listener.endpoint.host, listener.endpoint.port)
        for _ in range(MAX_HANDSHAKES + 3)
    ]
    first_in = await dialled(listener)
    first_in.transport.write(b"hello")
    for reader, _ in silent[:4]:
        assert await reader.read() == b""
    (end,) = await ends.there(1)
    await end.grown.wait()
    assert end.received == b"hello"
    assert f"{MAX_HANDSHAKES - 1} in handshake" in repr(listener)
    listener.close()
    for reader, writer in silent:
        assert await reader.read() == b""
        writer.close()
    first_in.transport.close()
    end.transport.close()
    assert "0 in handshake" in repr(listener)


@on_both_loops
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"no TLS at all, but the hello of something else"])
async def test_who_does_not_finish_tls_in_time_or_speaks_none_is_hung_up_on(said: bytes) -> None:
    ends = Ends()
    listener = await listening(ends, timeout_s=0.2)
    reader, writer = await asyncio.open_connection(listener.endpoint.host, listener.endpoint.port)
    writer.write(said)
    await reader.read()  # to the end: an alert may come first
    assert "0 in handshake" in repr(listener) and not ends.made
    writer.close()
    listener.close()


@on_both_loops
async def test_a_peer_that_neither_authenticates_nor_ends_tls_is_soon_hung_up_on() -> None:
    listener = await listening(Ends(), timeout_s=0.2)
    port, tls = listener.endpoint.port, tls_of_nodes().client
    assert tls is not None
    assert await asyncio.to_thread(seconds_until_hung_up_on, port, tls) < 15
    listener.close()


@on_both_loops
async def test_many_are_let_in_at_once_and_what_comes_early_is_kept() -> None:
    ends = Ends()
    listener = await listening(ends)
    async with asyncio.TaskGroup() as group:
        dialling = [group.create_task(dialled(listener)) for _ in range(20)]
    with ExitStack() as stack:
        for number, task in enumerate(dialling):
            stack.callback(task.result().transport.close)
            task.result().transport.write(bytes([number]))
        for end in await ends.there(20):
            stack.callback(end.transport.close)
            await end.grown.wait()
        assert {bytes(end.received) for end in ends.made} == {bytes([number]) for number in range(20)}
    listener.close()


@pytest.mark.parametrize("who", ["plain", "another authority", "no certificate"])
async def test_who_has_no_certificate_of_the_cluster_is_not_let_in(who: str, tmp_path: Path) -> None:
    nodes = tls_of_nodes()
    client = {"plain": None, "another authority": load_tls(issue(tmp_path)).client}.get(who)
    if who == "no certificate":
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    async with RegionServer(SECRET, host="a", tls=nodes.server) as server:
        with pytest.raises(LinkClosed):
            async with TcpTransport(SECRET, tls=client).connect(server.address) as link:
                await link.read_into("image", 0, memoryview(bytearray(1)))


async def test_a_node_does_not_talk_to_a_server_of_another_authority(tmp_path: Path) -> None:
    strange = load_tls(issue(tmp_path))
    async with RegionServer(SECRET, host="a", tls=strange.server) as server:
        with pytest.raises(LinkClosed, match=r"(?i)certificate.verify.failed"):
            async with TcpTransport(SECRET, tls=tls_of_nodes().client).connect(server.address):
                pass


async def test_pulls_watches_and_shared_memory_work_within_tls(tmp_path: Path) -> None:
    tls = tls_of_nodes()
    path = tmp_path / "image"
    path.write_bytes(CONTENT)

    async def main() -> None:
        async with RegionServer(SECRET, host="a", tls=tls.server) as server:
            server.publish("image", GrowingRegion(CONTENT, shm_path=str(path), complete=True))
            for transport in (TcpTransport(SECRET, tls=tls.client), ShmTransport(SECRET, tls=tls.client)):
                assert await pulled(transport, server) == CONTENT
            heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            watcher = RegionWatcher(SECRET, tls=tls.client)
            async with watcher.watch(
                server.address, "image", 1000, lambda reported, answers: heard.set_result(reported.blocks)
            ):
                assert await heard == NBYTES // 1000

    async with asyncio.timeout(PATIENCE_S):
        await main()


async def pulled(transport: Transport, server: RegionServer) -> bytearray:
    buffer = bytearray(NBYTES)
    connector = Connector("a", [transport], require=transport.name)
    await pull([server.address], buffer, connector, lambda offset, view: [])
    return buffer
