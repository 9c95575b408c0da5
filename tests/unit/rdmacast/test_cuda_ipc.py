"""Reads of another process's GPU memory, over the fake of the driver: what is opened, and for how long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import pytest

from rdmacast.cast.report import CastReport
from rdmacast.errors import DeviceError, NotShared, ProtocolError
from rdmacast.fakes.cuda_ipc import MemoryIpcDriver, MemoryMachine
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import PeerAddress, Transport
from rdmacast.transports.connector import Connector
from rdmacast.transports.cuda_ipc.exporter import CudaIpcExporter
from rdmacast.transports.cuda_ipc.memory import CudaIpcMemory
from rdmacast.transports.cuda_ipc.transport import CudaIpcTransport
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.patience import until
from tests.fixtures.pulls import comparing, pull
from tests.fixtures.transport import CONTENT, NBYTES, SECRET, GpuRegion

BEFORE = 4096  # of the allocation, in front of the region
CUTS = range(0, NBYTES + 1, 500_000)


@dataclass
class Host:
    """One machine: a process that serves "image" from its GPU, and the driver of another."""

    machine: MemoryMachine
    region: GpuRegion
    server: RegionServer
    here: MemoryIpcDriver

    def transport(self) -> CudaIpcTransport:
        return CudaIpcTransport(SECRET, self.here)


@asynccontextmanager
async def make_host(*, exports: bool = True, on_gpu: bool = True) -> AsyncIterator[Host]:
    """When it ends, everything was closed before it was freed."""
    machine = MemoryMachine()
    there, here = MemoryIpcDriver(machine), MemoryIpcDriver(machine)
    nbytes = BEFORE + NBYTES
    base = there.allocate(bytes(BEFORE) + CONTENT)
    exporter = CudaIpcExporter(there)
    with exporter.added(base, nbytes):
        async with RegionServer(SECRET, host="a", exporters=[exporter] if exports else []) as server:
            region = GpuRegion(CONTENT, complete=True)
            region.base = base + BEFORE if on_gpu else None
            server.publish("image", region)
            yield Host(machine, region, server, here)
    there.free(base)
    assert not machine.faults and not here.opened


async def test_an_allocation_is_open_once_for_all_reads_and_only_while_they_last() -> None:
    async with make_host() as host, host.transport().connect(host.server.address) as link:
        buffer = memoryview(bytearray(NBYTES))
        await asyncio.gather(
            *(link.read_into("image", start, buffer[start:end]) for start, end in pairwise(CUTS))
        )
        assert buffer == CONTENT and link.received_bytes == NBYTES
        assert 1 <= host.machine.opens <= len(CUTS) and not host.here.opened
        await link.read_into("image", 0, buffer[:10])
        assert not host.here.opened


async def test_two_links_of_a_process_open_it_once() -> None:
    async with make_host() as host:
        transport = host.transport()
        async with transport.connect(host.server.address) as one:
            async with transport.connect(host.server.address) as two:
                buffers = [bytearray(NBYTES) for _ in range(8)]
                links = [one, two] * 4
                await asyncio.gather(
                    *(
                        link.read_into("image", 0, memoryview(into))
                        for link, into in zip(links, buffers, strict=True)
                    )
                )
                assert all(into == CONTENT for into in buffers)


@pytest.mark.parametrize(
    ("exports", "reported"),
    [(False, "does not export memory by cuda_ipc"), (True, "region image is not on a GPU")],
)
async def test_what_is_not_on_a_gpu_or_not_lent_is_read_in_another_way(exports: bool, reported: str) -> None:
    async with make_host(exports=exports, on_gpu=not exports) as host:
        async with host.transport().connect(host.server.address) as link:
            with pytest.raises(NotShared, match=reported):
                await link.read_into("image", 0, memoryview(bytearray(10)))
        report = await pulled(host, [ShmTransport(SECRET), host.transport(), TcpTransport(SECRET)])
        assert dict(report.bytes_by_transport) == {"tcp": NBYTES}


async def test_a_region_without_a_file_is_read_from_the_gpu_and_the_choice_says_why() -> None:
    async with make_host() as host:
        report = await pulled(host, [ShmTransport(SECRET), host.transport(), TcpTransport(SECRET)])
        assert dict(report.bytes_by_transport) == {"cuda_ipc": NBYTES}
        choice = report.choices["s0"]
        assert choice.reason == "same host 'a'; no shared memory: it cannot serve this region"


async def pulled(host: Host, transports: list[Transport]) -> CastReport:
    buffer = bytearray(NBYTES)
    report = await pull([host.server.address], buffer, Connector("a", transports), comparing(CONTENT))
    assert buffer == CONTENT
    return report


async def test_an_allocation_that_cannot_be_opened_here_is_not_shared() -> None:
    """Such as another machine's or container's, under the same name of a host; or this process's own."""
    async with make_host() as host:
        strange = CudaIpcTransport(SECRET, MemoryIpcDriver(MemoryMachine()))
        async with strange.connect(host.server.address) as link:
            with pytest.raises(NotShared, match="no such allocation on this machine"):
                await link.read_into("image", 0, memoryview(bytearray(10)))


async def test_a_server_on_another_host_is_refused() -> None:
    async with make_host() as host:
        with pytest.raises(ProtocolError, match="on host 'a', not on 'b'"):
            async with host.transport().connect(PeerAddress(url=host.server.address.url, host="b")) as link:
                await link.aclose()


async def test_a_withdrawal_waits_for_the_copy_and_so_does_a_cancelled_read() -> None:
    async with make_host() as host, host.transport().connect(host.server.address) as link:
        reading = asyncio.create_task(link.read_into("image", 0, memoryview(bytearray(NBYTES))))
        await until(lambda: bool(host.machine.opens) or reading.done())
        reading.cancel()
        await asyncio.wait({reading})
        assert not host.here.opened
        await host.server.withdraw("image")


def test_only_ranges_of_what_was_added_are_lent() -> None:
    driver = MemoryIpcDriver(MemoryMachine())
    exporter, base = CudaIpcExporter(driver), driver.allocate(bytes(8192))
    with exporter.added(base, 8192):
        lent = exporter.lookup(base + 4096, 4096)
        assert (lent.allocation_bytes, lent.offset) == (8192, 4096)
        assert CudaIpcMemory.decode(lent.encode()) == lent
        for pointer, nbytes in ((base - 1, 1), (base + 4097, 4096), (base + 8192, 1)):
            with pytest.raises(NotShared):
                exporter.lookup(pointer, nbytes)
    with pytest.raises(NotShared):
        exporter.lookup(base, 1)
    with pytest.raises(DeviceError, match="no allocation of this process begins there"):
        with exporter.added(base + 4096, 4096):  # part of an allocation, as memory of a pool is
            pass
    driver.free(base)


def test_the_fake_holds_to_the_drivers_rules() -> None:
    machine = MemoryMachine()
    owner, reader = MemoryIpcDriver(machine), MemoryIpcDriver(machine)
    base = owner.allocate(CONTENT)
    handle = owner.export(base)
    with pytest.raises(DeviceError, match="this process's own"):
        owner.open(handle)
    mapped = reader.open(handle)
    with pytest.raises(DeviceError, match="open already"):
        reader.open(handle)
    into = bytearray(10)
    with pytest.raises(DeviceError, match="not open"):
        reader.copy(0, mapped + NBYTES, 1)
    owner.free(base)
    assert machine.faults == [f"{NBYTES} bytes were freed while a peer had them open"]
    reader.close(mapped)
    with pytest.raises(DeviceError, match="nothing is open"):
        reader.close(mapped)
    assert not any(into)


async def test_a_region_that_knows_of_no_gpu_is_not_on_one() -> None:
    async with make_host() as host:
        host.server.publish("plain", GrowingRegion(CONTENT, complete=True))
        async with host.transport().connect(host.server.address) as link:
            with pytest.raises(NotShared, match="region plain is not on a GPU"):
                await link.read_into("plain", 0, memoryview(bytearray(10)))
