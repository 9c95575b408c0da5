"""What only a real kernel shows of reads by RDMA: dead peers, refused memory, and what is registered."""

import asyncio
import mmap
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from rdmacast.errors import LinkClosed
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transports.connector import Connector
from rdmacast.transports.verbs.address import RemoteMemory
from rdmacast.transports.verbs.device import LocalMemory, ReadGrant
from rdmacast.transports.verbs.exporter import VerbsExporter
from rdmacast.transports.verbs.grants import granted
from rdmacast.transports.verbs.memory import address_of
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
                served._exports.session("verbs")._pair._qp.close()  # type: ignore[attr-defined]
                with pytest.raises(LinkClosed, match="RETRY_EXC_ERR, the peer does not answer"):
                    await link.read_into("image", 0, memoryview(bytearray(100_000)))

    run(main)


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("wrong", ["key", "range", "withdrawn", "read-only memory, withdrawn"])
def test_memory_that_is_not_given_is_refused_and_the_queue_pair_thrown_away(
    wrong: str, windows: bool
) -> None:
    """By a window of registered memory, or by a registration of the range alone."""
    if windows and wrong == "range":
        pytest.skip("Soft-RoCE does not check the ends of windows, and so is used without them")

    async def main() -> None:
        with open_node() as here, open_node() as there:
            there.device._binds = windows  # type: ignore[attr-defined]
            asker, answerer = here.queue_pair(), there.device.serving_pair()
            assert answerer.binds == windows
            asker.connect(answerer.address)
            answerer.connect(asker.address)
            failed: asyncio.Future[LinkClosed] = asyncio.get_running_loop().create_future()
            reads = ReadQueue(asker, here.device.depth, here.device.message_bytes, failed.set_result)
            content = bytes(range(256)) * 32
            page = memoryview(content if "read-only" in wrong else bytearray(content))
            buffer = mmap.mmap(-1, 8192)
            with here.memory.local(memoryview(buffer)) as local:
                with granted(there.memory, answerer, page[:4096]) as remote:
                    await reads.read(local, remote, 4096)
                    assert content[:4096] == buffer[:4096]
                    memory = {
                        "key": RemoteMemory(remote.address, remote.rkey ^ 0xFF00),
                        "range": RemoteMemory(remote.address + 1, remote.rkey),
                    }.get(wrong, remote)
                    if wrong in ("key", "range"):
                        await refused(reads, local, memory)
                if "withdrawn" in wrong:
                    await refused(reads, local, memory)
            assert "REM_ACCESS_ERR" in str(await failed)
            answerer.close()

    run(main)


def test_a_key_is_of_no_use_to_another_peer_and_many_grants_leave_nothing() -> None:
    before = resources()

    async def main() -> None:
        with open_node() as here, open_node() as there:
            there.device._binds = True  # type: ignore[attr-defined]
            page, buffer = memoryview(bytearray(b"secret" * 1000)), mmap.mmap(-1, 8192)
            ends = [(here.queue_pair(), there.device.serving_pair()) for _ in range(2)]
            for asker, answerer in ends:
                asker.connect(answerer.address)
                answerer.connect(asker.address)
            (own, served), (another, _) = ends
            depth, longest = here.device.depth, here.device.message_bytes
            with here.memory.local(memoryview(buffer)) as local:
                reads = ReadQueue(own, depth, longest, lambda _: None)
                keys = set()
                for _ in range(300):
                    with granted(there.memory, served, page[:100]) as remote:
                        keys.add(remote.rkey)
                        await reads.read(local, remote, 100)
                assert len(keys) == 300
                with granted(there.memory, served, page[:100]) as remote:
                    await refused(ReadQueue(another, depth, longest, lambda _: None), local, remote, 100)
                    await reads.read(local, remote, 100)
                reads.close(LinkClosed("the test is over"))
            for _, answerer in ends:
                answerer.close()

    run(main)
    assert resources() == before


def test_what_a_grant_costs_is_known() -> None:
    """Prints it; a software device shows the ratio, not an adapter's times."""
    with open_node() as here, open_node() as there:
        assert not there.device._binds, "Soft-RoCE checks windows now: lift the skip"  # type: ignore[attr-defined]
        there.device._binds = True  # type: ignore[attr-defined]
        asker, answerer = here.queue_pair(), there.device.serving_pair()
        asker.connect(answerer.address)
        answerer.connect(asker.address)
        image = memoryview(mmap.mmap(-1, 16 << 20))
        image[:: mmap.PAGESIZE] = bytes(len(image) // mmap.PAGESIZE)
        start = address_of(image)
        with there.memory.registered(image) as registered:
            for nbytes in (256 << 10, 4 << 20, 16 << 20):
                window = timed(partial(answerer.bind, registered, start, nbytes))
                region = timed(partial(answerer.register, start, nbytes, is_gpu=False))
                print(f"grant of {nbytes >> 10} KiB: window {window:.0f} us, registration {region:.0f} us")
        asker.close()
        answerer.close()


def timed(grant: Callable[[], ReadGrant]) -> float:
    """Return the median time in microseconds."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        grant().close()
        times.append(time.perf_counter() - start)
    return sorted(times)[4] * 1e6


async def refused(reads: ReadQueue, local: LocalMemory, remote: RemoteMemory, nbytes: int = 4096) -> None:
    with pytest.raises(LinkClosed, match="REM_ACCESS_ERR, the peer refuses access to that memory"):
        await reads.read(local, remote, nbytes)


def test_a_file_mapped_for_reading_is_served(tmp_path: Path) -> None:
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
                # Soft-RoCE serves by a registration of each range, which ends with its grant.
                assert (there.memory.registrations, here.memory.registrations) == (0, 1)

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
