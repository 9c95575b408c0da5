"""Reads by NIXL over agents in memory: which agent is used again, and which goes with its reads."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from rdmacast.errors import DeviceError, LinkClosed, NoTransport, ProtocolError
from rdmacast.fakes.nixl import MemoryNixl
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.transport import Link
from rdmacast.transports.nixl.exporter import NixlExporter
from rdmacast.transports.nixl.memory import MAX_METADATA_BYTES, NixlMemory, NixlProbe
from rdmacast.transports.nixl.node import NixlNode
from rdmacast.transports.nixl.reader import AgentMemory
from rdmacast.transports.nixl.transport import NixlTransport
from tests.fixtures.patience import until
from tests.fixtures.transport import CONTENT, SECRET


@dataclass
class Pair:
    """Two nodes of one network; `there` serves CONTENT as "image"."""

    network: MemoryNixl
    here: NixlNode
    there: NixlNode
    server: RegionServer

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        async with NixlTransport(SECRET, self.here).connect(self.server.address) as link:
            yield link


@asynccontextmanager
async def make_pair(*, offered: bool = True) -> AsyncIterator[Pair]:
    """When it ends no agent is left."""
    network = MemoryNixl()
    with NixlNode(network) as here, NixlNode(network) as there:
        async with RegionServer(
            SECRET, host="b", exporters=[NixlExporter(there)] if offered else []
        ) as server:
            server.publish("image", GrowingRegion(CONTENT, complete=True))
            yield Pair(network, here, there, server)
    assert not network.agents


async def test_an_agent_without_reads_under_way_is_used_again() -> None:
    async with make_pair() as pair:
        for _ in range(5):
            async with pair.link() as link:
                buffer = bytearray(1000)
                await link.read_into("image", 5, memoryview(buffer))
                assert buffer == CONTENT[5:1005] and link.received_bytes == 1000
        assert len(pair.network.agents) == 3  # that of each node, and one that reads


async def test_a_cancelled_read_is_waited_for_and_one_whose_link_ends_goes_with_its_agent() -> None:
    async with make_pair() as pair, pair.link() as link:
        pair.network.held = True
        buffer = bytearray(100_000)
        reading = asyncio.create_task(link.read_into("image", 0, memoryview(buffer)))
        await until(lambda: "1 under way" in repr(link))
        for _ in range(3):
            reading.cancel()
            await asyncio.sleep(0)
        assert not reading.done()
        await link.aclose()
        with pytest.raises(asyncio.CancelledError):
            await reading
        pair.network.held = False
        assert len(pair.network.agents) == 2  # the one that read is gone
        async with pair.link() as another:
            await another.read_into("image", 0, memoryview(bytearray(1000)))
        assert not any(buffer)


async def test_a_peer_that_stops_answering_ends_its_link_and_all_reads() -> None:
    async with make_pair() as pair, pair.link() as link:
        pair.network.cut = True
        reads = [link.read_into("image", 0, memoryview(bytearray(200_000))) for _ in range(3)]
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(result) for result in results] == [LinkClosed] * 3
        assert "does not answer" in str(results[0])
        with pytest.raises(NoTransport, match=r"no NIXL path to .*does not answer"):
            async with pair.link():
                pass
        pair.network.cut = False
        async with pair.link() as another:
            await another.read_into("image", 0, memoryview(bytearray(1)))


async def test_a_peer_without_nixl_says_so() -> None:
    async with make_pair(offered=False) as pair:
        with pytest.raises(NoTransport, match="no NIXL: this node does not export memory by nixl"):
            async with pair.link():
                pass


async def test_a_path_that_leads_nowhere_is_found_before_the_first_read() -> None:
    async with make_pair() as pair:
        pair.network.held = True
        short = LinkSettings(handshake_timeout_s=1.0)
        with pytest.raises(NoTransport, match="no NIXL path"):
            async with NixlTransport(SECRET, pair.here, settings=short).connect(pair.server.address):
                pass


async def test_agents_of_two_networks_do_not_meet() -> None:
    async with make_pair() as pair:
        short = LinkSettings(handshake_timeout_s=1.0)
        with NixlNode(MemoryNixl()) as strange:
            with pytest.raises(NoTransport, match=r"no NIXL path to .*: nothing was received over it"):
                async with NixlTransport(SECRET, strange, settings=short).connect(pair.server.address):
                    pass


async def test_a_peer_that_names_another_agent_later_is_not_believed() -> None:
    async with make_pair() as pair:
        reader = await pair.here.reader()
        reader.load_metadata(b'["one", 0, 1]')
        reader.load_metadata(b'["one", 4096, 1]')
        with pytest.raises(DeviceError, match="another one now"):
            reader.load_metadata(b'["two", 0, 1]')
        reader.close()


async def test_the_agent_makes_progress_only_while_somebody_may_read() -> None:
    async with make_pair() as pair:
        agent = next(one for one in pair.network.agents.values() if one is pair.there._agent)
        async with pair.link() as link:
            await link.read_into("image", 0, memoryview(bytearray(1000)))
        await until(lambda: pair.there._timer is None)
        assert agent.answered > 0 and "0 shared" in repr(pair.there)


def test_of_memory_that_is_gone_nothing_is_kept() -> None:
    """A node shows images for months, and what an agent says of each piece takes kilobytes."""
    network = MemoryNixl()
    memory = AgentMemory(network.agent())
    for _ in range(3):
        image = np.zeros(4096, np.uint8)
        with memory.shared(memoryview(image)):
            assert "1 pieces" in repr(memory)
        del image
        gc.collect()
        assert "0 pieces" in repr(memory)


def test_probes_are_checked() -> None:
    probe = NixlProbe(NixlMemory(4096, b"agent"), bytes(range(16)))
    assert NixlProbe.decode(probe.encode()) == probe
    for wrong in (b"", bytes(24), probe.nonce + b"\xff" * 9, bytes(25 + MAX_METADATA_BYTES)):
        with pytest.raises(ProtocolError):
            NixlProbe.decode(wrong)
