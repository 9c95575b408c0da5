"""One contract for every transport: over real sockets, real files, and in memory."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from rdmacast.errors import LinkClosed, PeerAuthError, ProtocolError, RegionGone
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import Transport
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.cuda_ipc import why_no_gpu
from tests.fixtures.nixl import why_no_nixl
from tests.fixtures.transport import CONTENT, NBYTES, SECRET, Rig, make_rig
from tests.fixtures.verbs import why_no_rdma

LACKS = {
    "verbs": why_no_rdma() and f"make test-rdma: {why_no_rdma()}",
    "nixl": why_no_nixl() and f"needs hypercast[nixl]: {why_no_nixl()}",
    "cuda_ipc": why_no_gpu() and f"needs a GPU: {why_no_gpu()}",
}
NEEDING = [
    pytest.param(f"{kind}{loop}", marks=pytest.mark.skipif(bool(lacks), reason=lacks))
    for kind, lacks in LACKS.items()
    for loop in ("", "-uvloop")
]
FAKES = ["memory", "fabric", "agents", "lent"]
KINDS = [*FAKES, "shm", "tcp", "tls", "tcp-uvloop", "shm-uvloop", "tls-uvloop", *NEEDING]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def rig(kind: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with make_rig(kind.partition("-")[0], tmp_path) as rig:
        yield rig


async def test_reads_land_where_they_belong(rig: Rig) -> None:
    rig.region.complete()
    buffer = bytearray(NBYTES)
    view = memoryview(buffer)
    cuts = [0, 1, 17, 65_536, 262_144, 1_500_000, NBYTES]
    await asyncio.gather(
        *(rig.link.read_into("image", start, view[start:end]) for start, end in pairwise(cuts))
    )
    assert buffer == CONTENT
    await rig.link.read_into("image", 5, memoryview(bytearray()))


async def test_a_read_waits_for_its_bytes_and_others_overtake_it(rig: Rig) -> None:
    late, early = bytearray(1000), bytearray(2000)
    rig.region.mark(0, 2000)
    waiting = asyncio.create_task(rig.link.read_into("image", 5000, memoryview(late)))
    await rig.region.awaited.wait()
    await rig.link.read_into("image", 0, memoryview(early))
    assert early == CONTENT[:2000] and not waiting.done()
    rig.region.mark(5000, 500)
    assert not waiting.done()
    rig.region.mark(5500, 500)
    await waiting
    assert late == CONTENT[5000:6000]


async def test_a_region_that_fails_or_is_not_there_is_gone(rig: Rig) -> None:
    buffer = memoryview(bytearray(100))
    with pytest.raises(RegionGone):
        await rig.link.read_into("another", 0, buffer)
    waiting = asyncio.create_task(rig.link.read_into("image", 0, buffer))
    await rig.region.awaited.wait()
    rig.region.fail(OSError("the disk is gone"))
    with pytest.raises(RegionGone, match="the disk is gone"):
        await waiting
    with pytest.raises(RegionGone):
        await rig.link.read_into("image", 0, buffer)


async def test_a_range_outside_the_region_is_a_protocol_error_and_the_link_lives(rig: Rig) -> None:
    rig.region.complete()
    with pytest.raises(ProtocolError, match="outside"):
        await rig.link.read_into("image", NBYTES - 10, memoryview(bytearray(11)))
    buffer = bytearray(10)
    await rig.link.read_into("image", NBYTES - 10, memoryview(buffer))
    assert buffer == CONTENT[-10:]
    with pytest.raises(ValueError, match="read-only"):
        await rig.link.read_into("image", 0, memoryview(b"xy"))


async def test_after_cancellation_nothing_is_written_and_the_link_lives(rig: Rig) -> None:
    buffer = bytearray(1_000_000)
    waiting = asyncio.create_task(rig.link.read_into("image", 0, memoryview(buffer)))
    await rig.region.awaited.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    rig.region.complete()
    # Cancelled at every stage of its way: asked for, being sent, arriving.
    for steps in range(40):
        reading = asyncio.create_task(rig.link.read_into("image", 0, memoryview(buffer)))
        for _ in range(steps):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        buffer[:] = bytes(len(buffer))
        small = bytearray(70_000)
        await rig.link.read_into("image", 1_500_000, memoryview(small))
        assert small == CONTENT[1_500_000:1_570_000]
        assert not any(buffer)


async def test_closing_ends_reads_and_the_link_stays_closed(rig: Rig) -> None:
    waiting = asyncio.create_task(rig.link.read_into("image", 0, memoryview(bytearray(10))))
    await rig.region.awaited.wait()
    await rig.link.aclose()
    with pytest.raises(LinkClosed):
        await waiting
    with pytest.raises(LinkClosed):
        await rig.link.read_into("image", 0, memoryview(bytearray(10)))
    await rig.link.aclose()


async def test_a_withdrawn_region_is_gone_for_who_waits(rig: Rig) -> None:
    if rig.withdraw is None:
        return
    waiting = asyncio.create_task(rig.link.read_into("image", 0, memoryview(bytearray(10))))
    await rig.region.awaited.wait()
    await rig.withdraw()
    with pytest.raises(RegionGone, match="withdrawn"):
        await waiting
    with pytest.raises(RegionGone, match="no region"):
        await rig.link.read_into("image", 0, memoryview(bytearray(10)))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_another_secret_is_refused(kind: str, tmp_path: Path) -> None:
    async with RegionServer(SECRET, host="a") as server:
        transport: Transport = ShmTransport(b"other") if kind == "shm" else TcpTransport(b"other")
        with pytest.raises(PeerAuthError):
            async with transport.connect(server.address):
                pass
