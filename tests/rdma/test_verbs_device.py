"""What only a real kernel shows of reads by RDMA: dead peers, refused memory, and what is registered."""

import asyncio
import mmap
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rdmacast.errors import LinkClosed
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transports.connector import Connector
from rdmacast.transports.verbs.address import RemoteMemory
from rdmacast.transports.verbs.device import LocalMemory
from rdmacast.transports.verbs.exporter import VerbsExporter
from rdmacast.transports.verbs.node import VerbsNode, open_node
from rdmacast.transports.verbs.reads import ReadQueue
from rdmacast.transports.verbs.transport import VerbsTransport
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.pulls import comparing, pull
from tests.fixtures.verbs import why_no_rdma
from tests.rdma.cast_nodes import CONTENT, NBYTES, SECRET, DamagingRegion, start

NO_RDMA = why_no_rdma()
pytestmark = pytest.mark.skipif(bool(NO_RDMA), reason=f"make test-rdma: {NO_RDMA}")


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await main()

    asyncio.run(limited())


def resources() -> str:
    """Return the kernel's resource counts of each device: queue pairs, registered memory and so on."""
    return subprocess.run(["rdma", "resource"], capture_output=True, text=True, check=True).stdout


def mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def serving(region: GrowingRegion) -> AsyncIterator[tuple[RegionServer, VerbsNode, VerbsNode]]:
    """Yield the server, its node and the reader's."""
    with open_node() as here, open_node() as there:
        async with RegionServer(SECRET, host="a", exporters=[VerbsExporter(there)]) as server:
            server.publish("image", region)
            yield server, there, here


def test_a_killed_peer_ends_the_reads_under_way() -> None:
    peer = start("n0", holds=True)
    peer.pipe.send(NBYTES // 2)

    async def main() -> None:
        with open_node() as node:
            async with VerbsTransport(SECRET, node).connect(peer.address) as link:
                buffer = bytearray(1000)
                await link.read_into("image", 0, memoryview(buffer))
                assert buffer == CONTENT[:1000]
                waiting = asyncio.create_task(link.read_into("image", NBYTES - 1000, memoryview(buffer)))
                reading = asyncio.create_task(link.read_into("image", 0, memoryview(bytearray(NBYTES // 2))))
                await until(lambda: link.received_bytes > 2000)
                peer.kill()
                results = await asyncio.gather(waiting, reading, return_exceptions=True)
                assert isinstance(results[0], LinkClosed)
                assert results[1] is None or isinstance(results[1], LinkClosed)  # it may have been quick

    run(main)


def test_a_peer_that_is_stopped_below_tcp_is_noticed_by_the_device() -> None:
    async def main() -> None:
        async with serving(GrowingRegion(CONTENT, complete=True)) as (server, _, here):
            async with VerbsTransport(SECRET, here).connect(server.address) as link:
                (served,) = server._links
                served._exports.session("verbs")._pair.close()  # type: ignore[attr-defined]
                with pytest.raises(LinkClosed, match="RETRY_EXC_ERR, the peer does not answer"):
                    await link.read_into("image", 0, memoryview(bytearray(100_000)))

    run(main)


@pytest.mark.parametrize("wrong", ["key", "range", "withdrawn"])
def test_memory_that_is_not_given_is_refused_and_the_queue_pair_thrown_away(wrong: str) -> None:
    async def main() -> None:
        with open_node() as here, open_node() as there:
            asker, answerer = here.device.queue_pair(), there.device.queue_pair()
            asker.connect(answerer.address)
            answerer.connect(asker.address)
            failed: asyncio.Future[LinkClosed] = asyncio.get_running_loop().create_future()
            reads = ReadQueue(asker, here.device.depth, here.device.message_bytes, failed.set_result)
            buffer, page = mmap.mmap(-1, 8192), memoryview(bytes(range(256)) * 32)
            with here.memory.local(memoryview(buffer)) as local:
                with there.memory.remote(page) as remote:
                    await reads.read(local, remote, 8192)
                    assert page == buffer[:]
                    memory = {
                        "key": RemoteMemory(remote.address, remote.rkey ^ 0xFF00),
                        "range": RemoteMemory(remote.address + 4096, remote.rkey),
                        "withdrawn": remote,
                    }[wrong]
                    if wrong != "withdrawn":
                        await refused(reads, local, memory)
                if wrong == "withdrawn":  # `bytes` are registered for the time of use
                    await refused(reads, local, memory)
            assert "REM_ACCESS_ERR" in str(await failed)
            answerer.close()

    run(main)


async def refused(reads: ReadQueue, local: LocalMemory, remote: RemoteMemory) -> None:
    with pytest.raises(LinkClosed, match="REM_ACCESS_ERR, the peer refuses access to that memory"):
        await reads.read(local, remote, 8192)


def test_a_file_mapped_for_reading_is_served_and_registered_once(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(CONTENT)

    async def main() -> None:
        async with serving(GrowingRegion(mapped(path), complete=True)) as (server, there, here):
            arena, step = memoryview(mmap.mmap(-1, NBYTES)), -(-NBYTES // 7)
            with here.memory.add(arena):
                async with VerbsTransport(SECRET, here).connect(server.address) as link:
                    parts = [(at, arena[at : at + step]) for at in range(0, NBYTES, step)]
                    await asyncio.gather(*(link.read_into("image", at, part) for at, part in parts))
                assert arena == CONTENT
                # Each of them with the page for tests.
                assert (there.memory.registrations, here.memory.registrations) == (2, 2)

    run(main)


def test_a_damaged_block_is_found_and_pulled_again() -> None:
    async def main() -> None:
        region = DamagingRegion(CONTENT, {70_000})
        region.complete()
        async with serving(region) as (server, _, here):
            buffer = bytearray(NBYTES)
            connector = Connector("b", [VerbsTransport(SECRET, here)], require="verbs")
            report = await pull([server.address], buffer, connector, comparing(CONTENT))
            assert buffer == CONTENT and report.faults.damaged == 1
            assert set(report.bytes_by_transport) == {"verbs"}

    run(main)


def test_nothing_is_left_open_after_many_links() -> None:
    before = resources()

    async def main() -> None:
        async with serving(GrowingRegion(CONTENT, complete=True)) as (server, there, here):
            files, registrations = [], []
            for _ in range(10):
                async with VerbsTransport(SECRET, here).connect(server.address) as link:
                    await link.read_into("image", 0, memoryview(bytearray(10_000)))
                await until(lambda: "0 links" in repr(server))
                files.append(open_files())
                registrations.append(there.memory.registrations)
            assert len(set(registrations[2:])) == 1, registrations
            # A link's socket may be closed a moment after the link.
            await until(lambda: open_files() <= files[2])
            assert resources() != before

    run(main)
    assert resources() == before
