"""What a hostile peer can read by RDMA: nothing but what it was granted, and only while it is."""

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from rdmacast.errors import LinkClosed
from rdmacast.fakes.verbs import MemoryDevice, MemoryFabric
from rdmacast.protocol.client_link import ClientLink, open_link
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.transports.verbs.address import QueuePairReply, RemoteMemory
from rdmacast.transports.verbs.exporter import VerbsExporter
from rdmacast.transports.verbs.memory import address_of
from rdmacast.transports.verbs.node import VerbsNode
from rdmacast.transports.verbs.reads import ReadQueue
from rdmacast.transports.verbs.transport import VerbsTransport
from tests.fixtures.patience import until
from tests.fixtures.transport import CONTENT, NBYTES, SECRET, GpuRegion

DEVICES = {"windows": {}, "registrations": {"windows": False}}
SERVED = 1 << 20  # of the image, in front of it and behind it


@dataclass
class Attacker:
    """A peer with the cluster's secret, which reads what it likes by its own queue pair."""

    node: VerbsNode
    link: ClientLink
    reads: ReadQueue

    async def read(self, memory: RemoteMemory, offset: int, nbytes: int) -> bytes:
        """Read with any key; raises LinkClosed if it is refused."""
        page = mmap.mmap(-1, 1 << 16)
        view = memoryview(page)[:nbytes]
        with self.node.memory.local(view) as local:
            await self.reads.read(local, RemoteMemory(memory.address + offset, memory.rkey), nbytes)
        return bytes(view)

    async def grant_ended(self, region: str, offset: int, nbytes: int) -> RemoteMemory:
        """Return a description of memory whose grant has ended."""
        async with self.link.export("verbs", region, offset, nbytes) as payload:
            memory = RemoteMemory.decode(payload)
        async with self.link.export("verbs", region, 0, 1):
            return memory  # the first one's CANCEL was answered before


@asynccontextmanager
async def attacker(node: VerbsNode, server: RegionServer) -> AsyncIterator[Attacker]:
    pair = node.device.queue_pair()
    reads = ReadQueue(pair, node.device.depth, node.device.message_bytes, lambda _: None)
    try:
        async with open_link(server.address.url, SECRET, LinkSettings()) as link:
            async with link.connect("verbs", pair.address.encode()) as payload:
                pair.connect(QueuePairReply.decode(payload).address)
            yield Attacker(node, link, reads)
    finally:
        reads.close(LinkClosed("the test is over"))


@asynccontextmanager
async def serving(
    kind: str, region: GrowingRegion, *, with_gpu: bool = False
) -> AsyncIterator[tuple[MemoryFabric, RegionServer, VerbsNode, VerbsNode]]:
    """Yield the server, its node, and the peer's."""
    fabric = MemoryFabric()
    served = MemoryDevice(fabric, with_gpu=with_gpu, **DEVICES[kind])
    with VerbsNode(MemoryDevice(fabric), "here") as here, VerbsNode(served, "there") as there:
        async with RegionServer(SECRET, host="b", exporters=[VerbsExporter(there)]) as server:
            server.publish("image", region)
            yield fabric, server, there, here


def mapped(content: bytes) -> mmap.mmap:
    mapping = mmap.mmap(-1, len(content))
    mapping[:] = content
    return mapping


@pytest.mark.parametrize("kind", DEVICES)
async def test_a_key_is_invalid_once_its_grant_has_ended(kind: str) -> None:
    async with serving(kind, GrowingRegion(mapped(CONTENT), complete=True)) as (_, server, _, here):
        async with attacker(here, server) as peer:
            async with peer.link.export("verbs", "image", 5, 1000) as payload:
                granted = RemoteMemory.decode(payload)
                assert await peer.read(granted, 0, 1000) == CONTENT[5:1005]
            ended = await peer.grant_ended("image", 5, 1000)
            with pytest.raises(LinkClosed, match="refuses access"):
                await peer.read(ended, 0, 1000)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("offset", [-1, 1, 4096])
async def test_a_key_covers_no_more_than_its_grant(kind: str, offset: int) -> None:
    async with serving(kind, GrowingRegion(mapped(CONTENT), complete=True)) as (_, server, _, here):
        async with attacker(here, server) as peer:
            async with peer.link.export("verbs", "image", 1000, 1000) as payload:
                with pytest.raises(LinkClosed, match="refuses access"):
                    await peer.read(RemoteMemory.decode(payload), offset, 1000)


@pytest.mark.parametrize("kind", DEVICES)
async def test_caches_beside_an_image_on_a_gpu_cannot_be_read(kind: str) -> None:
    gpu = memoryview(mapped(CONTENT + b"a prompt of another tenant"))
    region = GpuRegion(bytes(NBYTES), complete=True)
    region.base = address_of(gpu)
    async with serving(kind, region, with_gpu=True) as (_, server, there, here):
        with there.memory.add_gpu(region.base, gpu.nbytes):
            async with attacker(here, server) as peer:
                async with peer.link.export("verbs", "image", NBYTES - 10, 10) as payload:
                    memory = RemoteMemory.decode(payload)
                    assert await peer.read(memory, 0, 10) == CONTENT[-10:]
                    with pytest.raises(LinkClosed, match="refuses access"):
                        await peer.read(memory, 10, 26)


async def test_a_key_is_of_no_use_to_another_peer() -> None:
    async with serving("windows", GrowingRegion(mapped(CONTENT), complete=True)) as (_, server, _, here):
        async with attacker(here, server) as peer, attacker(here, server) as another:
            async with peer.link.export("verbs", "image", 0, 1000) as payload:
                with pytest.raises(LinkClosed, match="refuses access"):
                    await another.read(RemoteMemory.decode(payload), 0, 1000)


@pytest.mark.parametrize("kind", DEVICES)
async def test_nothing_stays_granted_when_a_peer_leaves_in_the_middle(kind: str) -> None:
    async with serving(kind, GrowingRegion(mapped(CONTENT), complete=True)) as (fabric, server, _, here):
        async with attacker(here, server) as peer:
            async with peer.link.export("verbs", "image", 0, 1000):
                assert len(fabric.grants) == 2  # with the nonce
                peer.link.abort(LinkClosed("it is killed"))
                await until(lambda: not fabric.grants)


async def test_memory_of_a_queue_pair_that_cannot_be_closed_is_not_written_to_any_more() -> None:
    """Its READ lands nowhere: the memory was deregistered before its owner had it back."""
    async with serving("windows", GrowingRegion(mapped(CONTENT), complete=True)) as (fabric, server, _, here):
        buffer = mmap.mmap(-1, 4096)
        async with VerbsTransport(SECRET, here).connect(server.address) as link:
            fabric.held = True
            reading = asyncio.create_task(link.read_into("image", 0, memoryview(buffer)))
            await until(lambda: any("1 posted" in repr(one) for one in fabric.pairs.values()))
            fabric.refuses_pairs = True
            await link.aclose()
            with pytest.raises(LinkClosed):
                await reading
            fabric.held = False
            ended = [done for pair in tuple(fabric.pairs.values()) for done in pair.poll()]
            assert [done.fault for done in ended] == ["our own memory is not registered"]
            assert not any(buffer[:]) and not here.memory.quarantine.nbytes
            with pytest.raises(Exception, match="refused to close a queue pair"):
                here.queue_pair()
        fabric.refuses_pairs = False
        for pair in tuple(fabric.pairs.values()):
            pair.close()


async def test_memory_that_cannot_be_deregistered_either_is_quarantined_and_counted() -> None:
    async with serving("windows", GrowingRegion(mapped(CONTENT), complete=True)) as (fabric, server, _, here):
        buffer = mmap.mmap(-1, 4096)
        async with VerbsTransport(SECRET, here).connect(server.address) as link:
            fabric.held = True
            reading = asyncio.create_task(link.read_into("image", 0, memoryview(buffer)))
            await until(lambda: any("1 posted" in repr(one) for one in fabric.pairs.values()))
            fabric.refuses_pairs = fabric.refuses_memory = True
            await link.aclose()
            with pytest.raises(LinkClosed):
                await reading
            assert here.memory.quarantine.nbytes == 4096
            with pytest.raises(BufferError):  # it stays mapped, whatever its owner does
                buffer.close()
        fabric.refuses_pairs = fabric.refuses_memory = False
        for pair in tuple(fabric.pairs.values()):
            pair.close()
