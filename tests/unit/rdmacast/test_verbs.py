"""Reads by RDMA over devices in memory: what is registered, who is left, and what takes their place."""

import asyncio
import gc
import mmap
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from rdmacast.cast.report import CastReport
from rdmacast.errors import DeviceError, LinkClosed, NoTransport, NotShared, ProtocolError
from rdmacast.fakes.verbs import MemoryDevice, MemoryFabric, MemoryPair
from rdmacast.protocol.client_link import open_link
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.transport import Link
from rdmacast.transports.connector import Connector, PeerLinks
from rdmacast.transports.tcp import TcpTransport
from rdmacast.transports.verbs.address import NONCE_BYTES, QueuePairAddress, RemoteMemory
from rdmacast.transports.verbs.device import LocalMemory
from rdmacast.transports.verbs.exporter import VerbsExporter
from rdmacast.transports.verbs.gpu import exported
from rdmacast.transports.verbs.memory import PIECE_BYTES, RegisteredMemory, address_of
from rdmacast.transports.verbs.node import VerbsNode
from rdmacast.transports.verbs.reads import ReadQueue
from rdmacast.transports.verbs.transport import VerbsTransport
from tests.fixtures.patience import until
from tests.fixtures.pulls import comparing, pull
from tests.fixtures.transport import CONTENT, NBYTES, SECRET, GpuRegion
from tests.fixtures.verbs import why_no_rdma


@dataclass
class Pair:
    """Two nodes of one fabric; `there` serves CONTENT as "image"."""

    fabric: MemoryFabric
    here: VerbsNode
    there: VerbsNode
    server: RegionServer

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        async with VerbsTransport(SECRET, self.here).connect(self.server.address) as link:
            yield link

    async def pull(self, buffer: bytearray, connector: Connector) -> CastReport:
        return await pull([self.server.address], buffer, connector, comparing(CONTENT))


@asynccontextmanager
async def make_pair(*, offered: bool = True, limit_bytes: int | None = None) -> AsyncIterator[Pair]:
    """When it ends nothing is registered and no queue pair is left. `limit_bytes`: the reader's."""
    fabric = MemoryFabric()
    devices = MemoryDevice(fabric, limit_bytes=limit_bytes), MemoryDevice(fabric)
    with VerbsNode(devices[0], "here") as here, VerbsNode(devices[1], "there") as there:
        async with RegionServer(
            SECRET, host="b", exporters=[VerbsExporter(there)] if offered else []
        ) as server:
            server.publish("image", GrowingRegion(CONTENT, complete=True))
            yield Pair(fabric, here, there, server)
        assert not fabric.pairs
        await until(lambda: not fabric.grants)
    assert not fabric.memory and all(device.closed for device in devices)


async def test_a_peer_that_stops_answering_ends_its_link_and_all_reads() -> None:
    async with make_pair() as pair, pair.link() as link:
        await link.read_into("image", 0, memoryview(bytearray(1000)))
        pair.fabric.cut()
        reads = [link.read_into("image", 0, memoryview(bytearray(200_000))) for _ in range(3)]
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(result) for result in results] == [LinkClosed] * 3
        assert "does not answer" in str(results[0])
        with pytest.raises(LinkClosed):
            await link.read_into("image", 0, memoryview(bytearray(1)))
        async with pair.link() as another:
            buffer = bytearray(1000)
            await another.read_into("image", 0, memoryview(buffer))
            assert buffer == CONTENT[:1000] and another.received_bytes == 1000


async def test_a_cancelled_read_keeps_its_memory_until_nothing_can_land_in_it() -> None:
    async with make_pair() as pair, pair.link() as link:
        pair.fabric.held = True
        buffer = mmap.mmap(-1, 1 << 20)
        reading = asyncio.create_task(link.read_into("image", 0, memoryview(buffer)))
        await until(lambda: pair.here.memory.registrations == 1)
        for _ in range(3):
            reading.cancel()
            await asyncio.sleep(0)
        assert not reading.done()
        pair.fabric.held = False
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert 0 < link.received_bytes < len(buffer)  # what was posted landed, the rest was not posted
        buffer[:] = bytes(len(buffer))
        await link.read_into("image", 0, memoryview(bytearray(1000)))
        assert not any(buffer[:])


async def test_closing_ends_what_the_device_holds_back() -> None:
    async with make_pair() as pair, pair.link() as link:
        pair.fabric.held = True
        readings = [
            asyncio.create_task(link.read_into("image", 0, memoryview(bytearray(100_000)))) for _ in range(5)
        ]
        await until(lambda: pair.here.memory.registrations == 5)
        readings[1].cancel()
        await link.aclose()
        results = await asyncio.gather(*readings, return_exceptions=True)
        kinds = [type(result) for result in results]
        assert kinds == [LinkClosed, asyncio.CancelledError, LinkClosed, LinkClosed, LinkClosed]


async def test_a_withdrawal_takes_the_queue_pair_before_the_memory() -> None:
    """A reader that keeps its lease for too long cannot read what the memory serves afterwards."""
    async with make_pair() as pair, pair.link() as link:
        pair.fabric.held = True
        reading = asyncio.create_task(link.read_into("image", 0, memoryview(bytearray(1000))))
        await until(lambda: any("1 posted" in repr(one) for one in pair.fabric.pairs.values()))
        await pair.server.withdraw("image", drain_s=0.05)
        assert pair.there.memory.registrations == 1  # its own page
        pair.fabric.held = False
        with pytest.raises(LinkClosed):
            await reading


async def test_a_peer_without_rdma_is_read_over_tcp_and_the_choice_says_why() -> None:
    async with make_pair(offered=False) as pair:
        transports = [VerbsTransport(SECRET, pair.here), TcpTransport(SECRET)]
        buffer = bytearray(NBYTES)
        report = await pair.pull(buffer, Connector("a", transports))
        assert buffer == CONTENT and dict(report.bytes_by_transport) == {"tcp": NBYTES}
        choice = report.choices["s0"]
        assert choice.transport == "tcp"
        assert "no verbs: no RDMA: this node does not export memory by verbs" in choice.reason
        with pytest.raises(NoTransport, match=r"verbs is required.*does not export memory by verbs"):
            async with make_links(Connector("a", transports, require="verbs"), pair):
                pass


@asynccontextmanager
async def make_links(connector: Connector, pair: Pair) -> AsyncIterator[Link]:
    async with AsyncExitStack() as stack:
        yield await PeerLinks(connector, [pair.server.address], stack).get(0)


async def test_a_node_without_rdma_says_why_too() -> None:
    async with make_pair() as pair:
        absent = {"verbs": "pyverbs cannot be imported"}
        async with make_links(Connector("a", [TcpTransport(SECRET)], absent=absent), pair) as link:
            assert link.transport == "tcp"
        required = Connector("a", [TcpTransport(SECRET)], require="verbs", absent=absent)
        with pytest.raises(NoTransport, match="pyverbs cannot be imported"):
            required.choose(pair.server.address)


class MirroringDevice(MemoryDevice):
    """Reads from itself, with the numbers and keys that another fabric would use."""

    def queue_pair(self) -> MemoryPair:
        pair = super().queue_pair()
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        pair.register(address_of(memoryview(self.page)), NONCE_BYTES, is_gpu=False)
        return pair


@pytest.mark.parametrize(
    ("first_number", "reported"), [(500, "no RDMA path from strange"), (17, "leads to another node")]
)
async def test_ports_whose_networks_do_not_meet_are_found_before_the_first_read(
    first_number: int, reported: str
) -> None:
    async with make_pair() as pair:
        strange = MemoryFabric(first_number)
        with VerbsNode(MirroringDevice(strange), "strange") as node:
            with pytest.raises(NoTransport, match=reported):
                async with VerbsTransport(SECRET, node).connect(pair.server.address):
                    pass
        assert not strange.pairs and not strange.memory


async def test_memory_that_cannot_be_registered_is_filled_over_tcp() -> None:
    async with make_pair(limit_bytes=1 << 20) as pair:
        async with pair.link() as link:
            with pytest.raises(NotShared, match="cannot register 2000000 bytes"):
                await link.read_into("image", 0, memoryview(bytearray(2_000_000)))
        buffer = bytearray(NBYTES)
        transports = [VerbsTransport(SECRET, pair.here), TcpTransport(SECRET)]
        report = await pair.pull(buffer, Connector("a", transports))
        assert buffer == CONTENT and dict(report.bytes_by_transport) == {"tcp": NBYTES}


async def test_a_region_on_a_gpu_is_read_from_there_where_its_memory_is_registered() -> None:
    fabric, gpu = MemoryFabric(), memoryview(mmap.mmap(-1, NBYTES))
    gpu[:] = CONTENT
    region = GpuRegion(bytes(NBYTES), complete=True)
    region.base = address_of(gpu)
    with (
        VerbsNode(MemoryDevice(fabric), "here") as here,
        VerbsNode(MemoryDevice(fabric, with_gpu=True), "there") as there,
    ):
        async with RegionServer(SECRET, host="b", exporters=[VerbsExporter(there)]) as server:
            server.publish("image", region)
            async with VerbsTransport(SECRET, here).connect(server.address) as link:
                buffer = bytearray(1000)
                with pytest.raises(NotShared, match="that memory of a GPU is not registered"):
                    await link.read_into("image", 5, memoryview(buffer))
                with there.memory.add_gpu(region.base, NBYTES):
                    await link.read_into("image", 5, memoryview(buffer))
                assert buffer == CONTENT[5:1005]


def test_a_limit_of_locked_memory_is_named_where_it_is_the_reason() -> None:
    memory = RegisteredMemory(MemoryDevice(MemoryFabric(), limit_bytes=1 << 20))
    small, big = (memoryview(mmap.mmap(-1, nbytes)) for nbytes in (4096, 1 << 21))
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
    try:
        with memory.add(small):
            with pytest.raises(DeviceError, match=r"RLIMIT_MEMLOCK lets .* lock 65536 bytes, 4096 are"):
                with memory.local(big):
                    pass
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    memory.close()


def test_memory_is_registered_once_and_for_as_long_as_its_owner_lives() -> None:
    fabric = MemoryFabric()
    memory = RegisteredMemory(MemoryDevice(fabric))
    mapping = mmap.mmap(-1, 1 << 16)
    for start in (0, 100, 4096):
        with memory.local(memoryview(mapping)[start : start + 1000]):
            assert memory.registrations == 1
    with memory.local(memoryview(mapping)[5:6].toreadonly()) as local:
        assert next(iter(fabric.memory.values())).at(local.address, 1) is not None
    mapping.close()
    del mapping
    gc.collect()
    assert memory.registrations == 0 and not fabric.memory

    array = np.zeros(1000, np.uint8)
    with memory.local(memoryview(array[10:20])), memory.local(memoryview(array)[500:]):
        assert memory.registrations == 1
    with memory.local(memoryview(b"bytes cannot be watched")):
        assert memory.registrations == 2
    assert memory.registrations == 1

    arena = memoryview(bytearray(1 << 16))
    with memory.add(arena), memory.local(arena[100:200]), memory.local(arena[300:]):
        assert memory.registrations == 2
    with pytest.raises(DeviceError, match="no GPU"):
        with memory.add_gpu(1 << 40, 1 << 20):
            pass
    memory.close()
    assert not fabric.memory


def test_large_memory_is_registered_by_pieces_as_it_is_used() -> None:
    fabric = MemoryFabric()
    memory = RegisteredMemory(MemoryDevice(fabric))
    mapping = memoryview(mmap.mmap(-1, 3 * PIECE_BYTES + 4096))
    ranges = (
        (10, 20),
        (PIECE_BYTES - 5, 5),
        (PIECE_BYTES - 5, 10),
        (PIECE_BYTES - 1, 2),
        (3 * PIECE_BYTES, 4096),
    )
    for start, nbytes in ranges:
        with memory.local(mapping[start : start + nbytes]) as local:
            registration = fabric.memory[local.lkey]
            assert registration.at(local.address, nbytes) == address_of(mapping) + start
    sizes = sorted(registration.nbytes for registration in fabric.memory.values())
    assert sizes == [4096, PIECE_BYTES, 2 * PIECE_BYTES]
    memory.close()


def test_a_mapping_that_has_moved_is_registered_anew() -> None:
    fabric = MemoryFabric()
    memory = RegisteredMemory(MemoryDevice(fabric))
    mapping = mmap.mmap(-1, 1 << 16)
    with memory.local(memoryview(mapping)):
        pass
    mapping.resize(1 << 24)
    with memory.local(memoryview(mapping)) as local:
        (registration,) = fabric.memory.values()
        assert registration.at(local.address, 1 << 24) is not None
    memory.close()


async def test_a_server_gives_memory_to_links_with_a_queue_pair_only_and_one_to_each() -> None:
    async with make_pair() as pair:
        async with open_link(pair.server.address.url, SECRET, LinkSettings()) as link:
            with pytest.raises(NotShared, match="has no queue pair"):
                async with link.export("verbs", "image", 0, 10):
                    pass
            address = pair.here.device.queue_pair().address
            async with link.connect("verbs", address.encode()):
                pass
            with pytest.raises(NotShared, match="has its queue pair already"):
                async with link.connect("verbs", address.encode()):
                    pass
            async with link.export("verbs", "image", 0, 10) as payload:
                assert RemoteMemory.decode(payload).rkey in pair.fabric.grants
            with pytest.raises(ProtocolError, match="outside"):
                async with link.export("verbs", "image", NBYTES, 1):
                    pass
        pair.fabric.pairs.pop(address.number).close()


def test_what_a_machine_lacks_for_rdma_is_named() -> None:
    assert why_no_rdma() == "" or "pyverbs" in why_no_rdma() or "no RDMA" in why_no_rdma()


def test_addresses_are_checked() -> None:
    address = QueuePairAddress(number=5, first_psn=7, lid=0, mtu_bytes=4096, reads=16, gid=bytes(16))
    assert QueuePairAddress.decode(address.encode()) == address
    for wrong in (b"\xff" + address.encode()[1:], address.encode()[:10] + b"\0\1" + address.encode()[12:]):
        with pytest.raises(ProtocolError):
            QueuePairAddress.decode(wrong)


def test_without_nvidias_driver_gpu_memory_is_refused() -> None:
    try:
        with exported(0, 4096):
            raise AssertionError("address 0 was exported")
    except DeviceError as error:
        assert "NVIDIA" in str(error) or "cu" in str(error)


async def test_a_read_that_was_given_up_and_does_not_end_takes_the_link_with_it() -> None:
    fabric = MemoryFabric()
    fabric.held = True
    device = MemoryDevice(fabric)
    failed: asyncio.Future[LinkClosed] = asyncio.get_running_loop().create_future()
    reads = ReadQueue(
        device.queue_pair(), device.depth, device.message_bytes, failed.set_result, abandoned_s=0.01
    )
    reading = asyncio.create_task(reads.read(LocalMemory(0, 0), RemoteMemory(0, 0), 1000))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled() and "cancelled read did not end in 0.01 s" in str(await failed)
    assert not fabric.pairs
