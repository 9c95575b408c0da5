"""Pulling a region: every byte checked, the dead and the damaged worked around, failures named."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rdmacast.cast.pull import pull_settings
from rdmacast.cast.report import CastReport
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.errors import BlocksLost, LinkClosed
from rdmacast.fakes.transport import Faults, MemoryNetwork, MemoryTransport, MemoryWatcher
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import Link, PeerAddress
from rdmacast.transports.connector import Connector
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.pulls import Check, pull

SECRET = b"a secret of the cluster"
UNIT = 1000
NBYTES = 64 * UNIT + 123
CONTENT = os.urandom(NBYTES)
PEERS = tuple(PeerAddress(url=f"tcp://peer{i}:1", host=f"host{i}") for i in range(3))


def check(offset: int, view: memoryview) -> list[int]:
    """Return the units of the block at `offset` that differ from CONTENT."""
    assert offset % UNIT == 0
    return [
        (offset + start) // UNIT
        for start in range(0, len(view), UNIT)
        if view[start : start + UNIT] != CONTENT[offset + start : offset + start + UNIT][: len(view) - start]
    ]


class Rig:
    """Sources with faults, a destination, and what `on_block` heard."""

    def __init__(self, *faults: Faults, region: GrowingRegion | None = None) -> None:
        self.network = MemoryNetwork()
        source = region or GrowingRegion(CONTENT, complete=True)
        self.sources = tuple(
            self.network.add(peer, {"image": source}, fault)
            for peer, fault in zip(PEERS, faults, strict=False)
        )
        self.transport = MemoryTransport(self.network, name="tcp")
        self.buffer = bytearray(NBYTES)
        self.heard: list[tuple[int, int]] = []

    async def pull(self, check: Check = check, settings: SessionSettings | None = None) -> CastReport:
        return await pull(
            self.sources,
            self.buffer,
            Connector("here", [self.transport]),
            check,
            block_bytes=4 * UNIT,
            on_block=self.on_block,
            settings=settings,
            watcher=MemoryWatcher(self.network),
        )

    def on_block(self, offset: int, nbytes: int) -> None:
        assert self.buffer[offset : offset + nbytes] == CONTENT[offset : offset + nbytes]
        self.heard.append((offset, nbytes))


async def fetch(source: PeerAddress, into: bytearray, **given: Any) -> CastReport:
    """Pull over a real socket."""
    over = Connector("here", [TcpTransport(SECRET)])
    return await pull([source], into, over, check, block_bytes=4 * UNIT, **given)


def test_a_pull_fills_the_destination_and_reports() -> None:
    rig = Rig(Faults(), Faults())
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT
    assert sorted(rig.heard) == [(o, min(4 * UNIT, NBYTES - o)) for o in range(0, NBYTES, 4 * UNIT)]
    assert report.nbytes == NBYTES and not any(report.faults.lost)
    assert dict(report.bytes_by_transport) == {"tcp": NBYTES}
    assert dict(report.bytes_by_peer) == {"s0": NBYTES}
    assert "is not 'here'" in report.choices["s0"].reason


def test_a_damaged_block_comes_again_from_another_source() -> None:
    rig = Rig(Faults(corrupt=frozenset({9 * UNIT}), corrupt_times=99), Faults())
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT and report.faults.damaged == 1
    assert report.bytes_by_peer["s1"] == 4 * UNIT


def test_a_lone_source_is_asked_again_after_damage() -> None:
    rig = Rig(Faults(corrupt=frozenset({0}), corrupt_times=2))
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT and report.faults.damaged == 2


def test_damage_everywhere_names_the_block() -> None:
    bad = Faults(corrupt=frozenset({5 * UNIT, 6 * UNIT}), corrupt_times=99)
    rig = Rig(bad, bad)
    with pytest.raises(BlocksLost, match="blocks 1 of image") as caught:
        asyncio.run(rig.pull())
    assert caught.value.blocks == (1,)


def test_what_a_dead_source_gave_is_kept() -> None:
    rig = Rig(Faults(die_after_bytes=20 * UNIT), Faults(refuse=True), Faults())
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT
    assert dict(report.bytes_by_peer) == {"s0": 20 * UNIT, "s2": NBYTES - 20 * UNIT}
    assert len(rig.heard) == len(set(rig.heard)) == 17


def test_with_nobody_left_the_missing_bytes_are_named() -> None:
    rig = Rig(Faults(die_after_bytes=8 * UNIT), Faults(die_after_bytes=0))
    with pytest.raises(BlocksLost, match=r"s0: tcp://peer0:1 died") as caught:
        asyncio.run(rig.pull())
    assert caught.value.missing[0] == (8 * UNIT, 12 * UNIT) and caught.value.missing[-1][1] == NBYTES
    assert sum(nbytes for _, nbytes in rig.heard) == 8 * UNIT


def test_a_source_that_does_not_hold_the_region_is_left_at_once() -> None:
    rig = Rig(Faults(), Faults())
    rig.network.add(PEERS[0], {})
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT and dict(report.bytes_by_peer) == {"s1": NBYTES}
    assert report.seconds < 1.0


def test_a_stalled_source_is_given_up_where_a_limit_is_set() -> None:
    rig = Rig(Faults(stall_after_bytes=8 * UNIT), Faults())
    report = asyncio.run(rig.pull(settings=pull_settings(2.0)))
    assert rig.buffer == CONTENT
    assert report.bytes_by_peer["s0"] == 8 * UNIT


async def test_who_wait_for_each_other_give_up() -> None:
    async with RegionServer(SECRET, host="a") as a, RegionServer(SECRET, host="b") as b:

        async def fill(own: RegionServer, other: RegionServer) -> None:
            buffer = bytearray(NBYTES)
            region = GrowingRegion(buffer)
            own.publish("image", region)
            with pytest.raises(BlocksLost, match=r"no block after 0\.2"):
                await fetch(other.address, buffer, on_block=region.mark, settings=pull_settings(0.2))

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(fill(a, b), fill(b, a))


class _Unreachable(MemoryTransport):
    """Its dials to one peer end in a timeout; counts them."""

    def __init__(self, network: MemoryNetwork, unreachable: PeerAddress) -> None:
        super().__init__(network, name="tcp")
        self._unreachable = unreachable
        self.dials = 0

    @asynccontextmanager
    async def connect(self, peer: PeerAddress) -> AsyncIterator[Link]:
        if peer == self._unreachable:
            self.dials += 1
            await asyncio.sleep(0)
            raise LinkClosed("cannot connect within 10 s")
        async with super().connect(peer) as link:
            yield link


async def test_a_machine_that_is_gone_is_dialled_once_a_pull() -> None:
    rig = Rig(Faults(), Faults())
    rig.transport = _Unreachable(rig.network, rig.sources[0])
    await rig.pull()
    assert rig.buffer == CONTENT and rig.transport.dials == 1


async def test_a_cancelled_pull_touches_the_destination_no_more() -> None:
    before = asyncio.all_tasks()
    rig = Rig(Faults(stall_after_bytes=8 * UNIT))
    pulling = asyncio.create_task(rig.pull())
    await rig.network.stalled.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert asyncio.all_tasks() == before


async def test_a_fault_in_check_ends_the_pull_and_its_reads() -> None:
    rig = Rig(Faults())

    def broken(offset: int, view: memoryview) -> Sequence[int]:
        raise RuntimeError("no manifest")

    with pytest.raises(RuntimeError, match="no manifest"):
        await rig.pull(broken)


async def test_pulls_form_a_chain_over_regions_that_are_still_growing() -> None:
    """Node 1 pulls from node 0 and serves what it has to node 2 at once, over real sockets."""
    first = GrowingRegion(CONTENT)
    middle, last = bytearray(NBYTES), bytearray(NBYTES)
    relay = GrowingRegion(middle)
    async with RegionServer(SECRET, host="a") as one, RegionServer(SECRET, host="b") as two:
        one.publish("image", first)
        two.publish("image", relay)
        async with asyncio.TaskGroup() as group:
            group.create_task(fetch(one.address, middle, on_block=relay.mark))
            group.create_task(fetch(two.address, last))
            for start in range(0, NBYTES, 7777):
                first.mark(start, min(7777, NBYTES - start))
                await asyncio.sleep(0)
        assert middle == last == CONTENT and relay.is_complete


@pytest.mark.parametrize("shared", [True, False])
async def test_a_pull_on_one_host_uses_shm_or_says_that_it_could_not(shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(CONTENT)
    buffer = bytearray(NBYTES)
    async with RegionServer(SECRET, host="here") as server:
        region = GrowingRegion(CONTENT, shm_path=str(path) if shared else None, complete=True)
        server.publish("image", region)
        connector = Connector("here", [ShmTransport(SECRET, root=tmp_path), TcpTransport(SECRET)])
        report = await pull([server.address], buffer, connector, check, block_bytes=4 * UNIT)
    assert buffer == CONTENT
    (choice,) = report.choices.values()
    assert choice.transport == ("shm" if shared else "tcp")
    assert dict(report.bytes_by_transport) == {choice.transport: NBYTES}
    assert shared or "no shared memory" in choice.reason
