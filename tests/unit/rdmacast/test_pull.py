"""Pulling a region: every byte checked, the dead and the damaged worked around, failures named."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rdmacast.cast.pull import PullPlan, PullResult, pull
from rdmacast.errors import ChecksumError, LinkClosed, NoHolder
from rdmacast.fakes.transport import Faults, MemoryNetwork, MemoryTransport
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import Link, PeerAddress
from rdmacast.transports.connector import Connector
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from tests.fixtures.patience import PATIENCE_S

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
        self.buffer = bytearray(NBYTES)
        self.heard: list[tuple[int, int]] = []

    async def pull(
        self, *, window: int = 4, max_tries: int = 3, stall_timeout_s: float | None = None
    ) -> PullResult:
        plan = PullPlan(
            region="image",
            nbytes=NBYTES,
            block_bytes=4 * UNIT,
            sources=self.sources,
            window=window,
            max_tries=max_tries,
            stall_timeout_s=stall_timeout_s,
        )
        connector = Connector("here", [MemoryTransport(self.network, name="tcp")])
        return await pull(
            plan, memoryview(self.buffer), connector=connector, check=check, on_block=self.on_block
        )

    def on_block(self, offset: int, nbytes: int) -> None:
        assert self.buffer[offset : offset + nbytes] == CONTENT[offset : offset + nbytes]
        self.heard.append((offset, nbytes))


def test_a_pull_fills_the_destination_and_reports() -> None:
    rig = Rig(Faults(), Faults())
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT
    assert sorted(rig.heard) == [(o, min(4 * UNIT, NBYTES - o)) for o in range(0, NBYTES, 4 * UNIT)]
    assert (report.nbytes, report.retries) == (NBYTES, 0)
    assert dict(report.bytes_by_transport) == {"tcp": NBYTES}
    assert dict(report.bytes_by_source) == {PEERS[0].url: NBYTES}
    assert "is not 'here'" in report.choices[PEERS[0].url].reason


def test_a_damaged_block_comes_again_from_another_source() -> None:
    rig = Rig(Faults(corrupt=frozenset({9 * UNIT}), corrupt_times=99), Faults())
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT and report.retries == 1
    assert report.bytes_by_source[PEERS[1].url] == 4 * UNIT


def test_a_lone_source_is_asked_again_after_damage() -> None:
    rig = Rig(Faults(corrupt=frozenset({0}), corrupt_times=2))
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT and report.retries == 2


def test_damage_everywhere_names_the_units() -> None:
    bad = Faults(corrupt=frozenset({5 * UNIT, 6 * UNIT}), corrupt_times=99)
    rig = Rig(bad, bad)
    with pytest.raises(ChecksumError, match="units 5, 6") as caught:
        asyncio.run(rig.pull())
    assert caught.value.units == (5, 6)


def test_what_a_dead_source_gave_is_kept() -> None:
    rig = Rig(Faults(die_after_bytes=20 * UNIT), Faults(refuse=True), Faults())
    report = asyncio.run(rig.pull())
    assert rig.buffer == CONTENT
    assert report.bytes_by_source[PEERS[0].url] == 20 * UNIT
    assert report.bytes_by_source[PEERS[2].url] == NBYTES - 20 * UNIT
    assert len(rig.heard) == len(set(rig.heard)) == 17


def test_with_nobody_left_the_missing_bytes_are_named() -> None:
    rig = Rig(Faults(die_after_bytes=8 * UNIT), Faults(die_after_bytes=0))
    with pytest.raises(NoHolder, match=r"bytes \[8000, 64123\).*source 0: tcp://peer0:1 died") as caught:
        asyncio.run(rig.pull())
    assert caught.value.missing == ((8 * UNIT, NBYTES),)
    assert sum(nbytes for _, nbytes in rig.heard) == 8 * UNIT
    with pytest.raises(NoHolder, match="there was none"):
        asyncio.run(Rig().pull())


def test_a_stalled_source_is_given_up_where_a_limit_is_set() -> None:
    rig = Rig(Faults(stall_after_bytes=8 * UNIT), Faults())
    report = asyncio.run(rig.pull(stall_timeout_s=2.0))
    assert rig.buffer == CONTENT
    assert report.bytes_by_source[PEERS[0].url] == 8 * UNIT


async def test_who_wait_for_each_other_give_up() -> None:
    async with RegionServer(SECRET, host="a") as a, RegionServer(SECRET, host="b") as b:

        async def fill(own: RegionServer, other: RegionServer) -> None:
            buffer = bytearray(NBYTES)
            region = GrowingRegion(buffer)
            own.publish("image", region)
            plan = PullPlan(
                region="image",
                nbytes=NBYTES,
                block_bytes=4 * UNIT,
                sources=(other.address,),
                stall_timeout_s=0.2,
            )
            connector = Connector("here", [TcpTransport(SECRET)])
            with pytest.raises(NoHolder, match=r"no byte arrived for 0\.2 s"):
                await pull(plan, memoryview(buffer), connector=connector, check=check, on_block=region.mark)

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(fill(a, b), fill(b, a))


async def test_a_slow_source_that_moves_is_kept() -> None:
    async with RegionServer(SECRET, host="a", link_rate_bytes_s=40_000) as server:
        server.publish("image", GrowingRegion(CONTENT, complete=True))
        # One block, which takes longer than the limit: its bytes count before it is complete.
        plan = PullPlan(
            region="image",
            nbytes=NBYTES,
            block_bytes=65 * UNIT,
            sources=(server.address,),
            stall_timeout_s=1.0,
        )
        buffer, connector = bytearray(NBYTES), Connector("here", [TcpTransport(SECRET)])
        report = await pull(
            plan, memoryview(buffer), connector=connector, check=check, on_block=lambda *_: None
        )
        assert buffer == CONTENT and report.seconds > 1.0 and not report.retries


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
    transport = _Unreachable(rig.network, rig.sources[0])
    plan = PullPlan(region="image", nbytes=NBYTES, block_bytes=4 * UNIT, sources=rig.sources)
    await pull(
        plan,
        memoryview(rig.buffer),
        connector=Connector("here", [transport]),
        check=check,
        on_block=rig.on_block,
    )
    assert rig.buffer == CONTENT and transport.dials == 1


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

    plan = PullPlan(region="image", nbytes=NBYTES, block_bytes=UNIT, sources=rig.sources, window=1)
    connector = Connector("here", [MemoryTransport(rig.network, name="tcp")])
    with pytest.raises(RuntimeError, match="no manifest"):
        await pull(plan, memoryview(rig.buffer), connector=connector, check=broken, on_block=rig.on_block)


def test_a_destination_of_the_wrong_size_is_refused() -> None:
    rig = Rig(Faults())
    rig.buffer = bytearray(NBYTES + 1)
    with pytest.raises(ValueError, match="destination"):
        asyncio.run(rig.pull())


async def test_pulls_form_a_chain_over_regions_that_are_still_growing() -> None:
    """Node 1 pulls from node 0 and serves what it has to node 2 at once, over real sockets."""
    first = GrowingRegion(CONTENT)
    middle, last = bytearray(NBYTES), bytearray(NBYTES)
    relay = GrowingRegion(middle)

    async def fetch(source: PeerAddress, into: bytearray, region: GrowingRegion | None) -> None:
        plan = PullPlan(region="image", nbytes=NBYTES, block_bytes=4 * UNIT, sources=(source,))
        await pull(
            plan,
            memoryview(into),
            connector=Connector("here", [TcpTransport(SECRET)]),
            check=check,
            on_block=region.mark if region else lambda offset, nbytes: None,
        )

    async with RegionServer(SECRET, host="a") as one, RegionServer(SECRET, host="b") as two:
        one.publish("image", first)
        two.publish("image", relay)
        async with asyncio.TaskGroup() as group:
            group.create_task(fetch(one.address, middle, relay))
            group.create_task(fetch(two.address, last, None))
            for start in range(0, NBYTES, 7777):
                first.mark(start, min(7777, NBYTES - start))
                await asyncio.sleep(0)
        assert middle == last == CONTENT and relay.is_complete


@pytest.mark.parametrize("shared", [True, False])
def test_a_pull_on_one_host_uses_shm_or_says_that_it_could_not(shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(CONTENT)

    async def main() -> PullResult:
        async with RegionServer(SECRET, host="here") as server:
            region = GrowingRegion(CONTENT, shm_path=str(path) if shared else None, complete=True)
            server.publish("image", region)
            buffer = bytearray(NBYTES)
            plan = PullPlan(region="image", nbytes=NBYTES, block_bytes=4 * UNIT, sources=(server.address,))
            report = await pull(
                plan,
                memoryview(buffer),
                connector=Connector("here", [ShmTransport(SECRET, root=tmp_path), TcpTransport(SECRET)]),
                check=check,
                on_block=lambda offset, nbytes: None,
            )
            assert buffer == CONTENT
            return report

    report = asyncio.run(main())
    (choice,) = report.choices.values()
    assert choice.transport == ("shm" if shared else "tcp")
    assert dict(report.bytes_by_transport) == {choice.transport: NBYTES}
    assert shared or "no shared memory" in choice.reason
