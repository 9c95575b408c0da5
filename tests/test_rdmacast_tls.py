"""TLS between nodes: who is let in, and casts within it."""

import asyncio
import ssl
from pathlib import Path

import pytest

from rdmacast.connector import Connector
from rdmacast.errors import LinkClosed
from rdmacast.pull import PullPlan, pull
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.tls import load_tls
from rdmacast.transport import Transport
from rdmacast.watching import RegionWatcher
from tests.patience import PATIENCE_S
from tests.tls_fixture import issue, tls_of_nodes
from tests.transport_fixture import CONTENT, NBYTES, SECRET


@pytest.mark.parametrize("who", ["plain", "another authority", "no certificate"])
def test_who_has_no_certificate_of_the_cluster_is_not_let_in(who: str, tmp_path: Path) -> None:
    nodes = tls_of_nodes()
    client = {"plain": None, "another authority": load_tls(issue(tmp_path)).client}.get(who)
    if who == "no certificate":
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    async def main() -> None:
        async with RegionServer(SECRET, host="a", tls=nodes.server) as server:
            with pytest.raises(LinkClosed):
                async with TcpTransport(SECRET, tls=client).connect(server.address) as link:
                    await link.read_into("image", 0, memoryview(bytearray(1)))

    asyncio.run(main())


def test_a_node_does_not_talk_to_a_server_of_another_authority(tmp_path: Path) -> None:
    strange = load_tls(issue(tmp_path))

    async def main() -> None:
        async with RegionServer(SECRET, host="a", tls=strange.server) as server:
            with pytest.raises(LinkClosed, match=r"(?i)certificate.verify.failed"):
                async with TcpTransport(SECRET, tls=tls_of_nodes().client).connect(server.address):
                    pass

    asyncio.run(main())


def test_pulls_watches_and_shared_memory_work_within_tls(tmp_path: Path) -> None:
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
                server.address, "image", 1000, lambda told, answers: heard.set_result(told.blocks)
            ):
                assert await heard == NBYTES // 1000

    async def limited() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main()

    asyncio.run(limited())


async def pulled(transport: Transport, server: RegionServer) -> bytearray:
    buffer = bytearray(NBYTES)
    await pull(
        PullPlan(region="image", nbytes=NBYTES, block_bytes=500_000, sources=(server.address,)),
        memoryview(buffer),
        connector=Connector("a", [transport], require=transport.name),
        check=lambda offset, view: [],
        on_block=lambda offset, nbytes: None,
    )
    return buffer
