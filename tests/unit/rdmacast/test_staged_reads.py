"""Reads of what only a GPU has, through copies in host memory, by peers that cannot read the GPU."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rdmacast.errors import LinkClosed, NotShared, RegionGone
from rdmacast.gpu_source import STAGED_BYTES
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.transport import SECRET

NBYTES = 2 * STAGED_BYTES + 1234
CONTENT = os.urandom(NBYTES)


class StagedRegion(GrowingRegion):
    """CONTENT on a GPU; `lent` counts copies in use, `most` those at once, and `good` are left to succeed."""

    def __init__(self, good: int = 100) -> None:
        super().__init__(None, nbytes=NBYTES, complete=True)
        self.good = good
        self.lent = self.most = 0
        self.staging = asyncio.Event()

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        return (1 << 40) + offset

    @asynccontextmanager
    async def staged(self, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        assert nbytes <= STAGED_BYTES
        if not self.good:
            raise RegionGone("it has left the GPU")
        self.good -= 1
        self.lent += 1
        self.staging.set()
        self.most = max(self.most, self.lent)
        copy = bytearray(CONTENT[offset : offset + nbytes])
        try:
            yield memoryview(copy).toreadonly()
        finally:
            copy[:] = bytes(nbytes)  # the next one gets the memory
            self.lent -= 1


async def test_reads_over_tcp_get_one_piece_after_the_other() -> None:
    region, into = StagedRegion(), bytearray(NBYTES)
    async with RegionServer(SECRET, host="a") as server:
        server.publish("image", region)
        async with TcpTransport(SECRET).connect(server.address) as link:
            await asyncio.gather(
                link.read_into("image", 0, memoryview(into)[:700]),
                link.read_into("image", 700, memoryview(into)[700:]),
            )
    assert bytes(into) == CONTENT
    assert (region.lent, region.most) == (0, 1), "a link sends one payload at a time"


async def test_shared_memory_is_refused_so_that_another_transport_is_tried() -> None:
    async with RegionServer(SECRET, host="a") as server:
        server.publish("image", StagedRegion())
        async with ShmTransport(SECRET).connect(server.address) as link:
            with pytest.raises(NotShared):
                await link.read_into("image", 0, memoryview(bytearray(10)))


async def test_a_read_that_loses_its_source_midway_ends_with_its_link() -> None:
    region = StagedRegion(good=1)
    async with RegionServer(SECRET, host="a") as server:
        server.publish("image", region)
        async with TcpTransport(SECRET).connect(server.address) as link:
            with pytest.raises(LinkClosed):
                await link.read_into("image", 0, memoryview(bytearray(NBYTES)))
    assert region.lent == 0


async def test_a_reader_that_leaves_returns_the_copy_that_it_was_sent() -> None:
    region = StagedRegion()
    async with RegionServer(SECRET, host="a") as server:
        server.publish("image", region)
        async with TcpTransport(SECRET, link_rate_bytes_s=50_000).connect(server.address) as link:
            reading = asyncio.create_task(link.read_into("image", 0, memoryview(bytearray(NBYTES))))
            async with asyncio.timeout(PATIENCE_S):
                await region.staging.wait()
        with pytest.raises(LinkClosed):
            await reading
    assert region.lent == 0
