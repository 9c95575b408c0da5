"""Casts in which bytes are damaged, nodes die, hang or return, and callers give up."""

import asyncio
import random
from pathlib import Path

import pytest

from rdmacast.cast.session_settings import SessionSettings
from rdmacast.errors import BlocksLost
from tests.fixtures.cast import (
    BLOCK_BYTES,
    BLOCKS,
    CONTENT,
    KINDS,
    NBYTES,
    UNIT,
    HangingRegion,
    make_rig,
)
from tests.fixtures.patience import PATIENCE_S, until


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("planner", ["binomial", "chain"])
@pytest.mark.parametrize("kind", KINDS)
async def test_damage_is_found_and_healed(kind: str, planner: str) -> None:
    seeded = random.Random(kind + planner)
    async with make_rig(kind, 6, 2, planner) as rig:
        for node in rig.nodes:
            node.region.bad = {seeded.randrange(NBYTES) for _ in range(2)}
        rig.start()
        reports = await rig.reports()
        given = sum(node.region.given for node in rig.nodes)
        assert given > 0
        assert sum(report.faults.damaged for report in reports) == given


@pytest.mark.parametrize("kind", KINDS)
async def test_damage_from_everybody_names_the_block(kind: str) -> None:
    async with make_rig(kind, 2) as rig:
        rig.nodes[0].region.bad = {7 * BLOCK_BYTES + UNIT}
        rig.nodes[0].region.always = True
        with pytest.raises(BlocksLost, match="blocks 7 of image") as caught:
            await rig.cast(1).run()
        assert caught.value.blocks == (7,)
        assert caught.value.missing == ((7 * BLOCK_BYTES, 8 * BLOCK_BYTES),)


@pytest.mark.parametrize("planner", ["binomial", "chain", "tree"])
@pytest.mark.parametrize("victim", [0, 2, 5], ids=["source", "relay", "target"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_that_dies_is_planned_around(kind: str, victim: int, planner: str) -> None:
    async with make_rig(kind, 6, 2, planner, loaded=10) as rig:
        rig.start()
        await asyncio.gather(*(rig.holds(index, 8) for index in range(2, 6)))
        await rig.kill(victim)
        rig.finish_loading()
        reports = await rig.reports()
        assert len(reports) == (4 if victim == 0 else 3)
        lost = {name for report in reports for name in report.faults.lost}
        assert lost <= {f"n{victim}"}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_nobody_holds_any_more_is_named(kind: str) -> None:
    async with make_rig(kind, 4, loaded=10) as rig:
        rig.start()
        await asyncio.gather(*(rig.holds(index, 10) for index in range(1, 4)))
        await rig.kill(0)
        casts = [node.cast for node in rig.nodes if node.cast is not None]
        for outcome in await asyncio.gather(*casts, return_exceptions=True):
            assert isinstance(outcome, BlocksLost) and outcome.blocks == tuple(range(10, BLOCKS))
            assert "n0: " in str(outcome)
        for node in rig.nodes[1:]:
            assert node.buffer[: 10 * BLOCK_BYTES] == CONTENT[: 10 * BLOCK_BYTES]


@pytest.mark.parametrize("kind", KINDS)
async def test_all_go_on_where_together_they_hold_what_the_source_held(kind: str) -> None:
    async with make_rig(kind, 4, planner="chain") as rig:
        rig.start(1)
        await rig.reports()
        await rig.kill(0)
        rig.start(2, 3)
        reports = (await rig.reports())[1:]
        assert all("n0" not in report.bytes_by_peer for report in reports)


@pytest.mark.parametrize("kind", ["tcp", "tcp-uvloop"])
async def test_a_node_that_withdraws_is_lost_to_the_others(kind: str) -> None:
    async with make_rig(kind, 3, 2, loaded=10) as rig:
        rig.start()
        await rig.holds(2, 10)
        server = rig.nodes[0].server
        assert server is not None
        await server.withdraw("image")
        rig.finish_loading(1)
        (report,) = await rig.reports()
        assert report.faults.lost.keys() <= {"n0"}


@pytest.mark.parametrize("kind", ["tcp", "tcp-uvloop"])
async def test_a_region_may_be_published_after_it_is_watched(kind: str) -> None:
    async with make_rig(kind, 2) as rig:
        server, region = rig.nodes[0].server, rig.nodes[0].region
        assert server is not None
        await server.withdraw("image")
        rig.start()
        await until(lambda: any(link._watches for link in server._links))
        server.publish("image", region)
        await rig.reports()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_slow_source_is_dropped_where_another_can_give(kind: str) -> None:
    """Blocks of the first source that are not there though it says so: as if it sent nothing."""
    settings = SessionSettings(pull_timeout_s=0.5, ask_timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
    async with make_rig(kind, 3, 2, settings=settings) as rig:
        hangs = HangingRegion(CONTENT)
        if rig.nodes[0].server is None:
            rig.network.add(rig.nodes[0].address, {"image": hangs})
        else:
            await rig.nodes[0].server.withdraw("image")
            rig.nodes[0].server.publish("image", hangs)
        rig.start()
        (report,) = await rig.reports()
        assert report.faults.late > 0 and report.faults.replanned > 0
        assert "n0" not in report.bytes_by_peer


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cast_may_be_cancelled_at_any_moment(kind: str) -> None:
    before: set[Path] = set()
    for turns in [*range(0, 12, 2), *range(12, 120, 18)]:
        async with make_rig(kind, 4) as rig:
            rig.start(1, 2)
            ends = asyncio.create_task(rig.cast(3).run())
            for _ in range(turns):
                await asyncio.sleep(0)
            ends.cancel()
            await asyncio.wait({ends})
            left = bytes(rig.nodes[3].buffer)
            reported = rig.nodes[3].region.bitfield(BLOCK_BYTES)
            assert reported.pending == 0 or not reported.held
            await rig.reports()
            assert rig.nodes[3].buffer == left
        for _ in range(20):
            await asyncio.sleep(0)  # sockets are closed some turns of the event loop later
        before = before or open_files()
    assert open_files() <= before


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_callback_raises_ends_the_cast(kind: str) -> None:
    async with make_rig(kind, 2) as rig:
        cast = rig.cast(1, on_block=lambda offset, nbytes: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await cast.run()
        assert cast.report.state == "cancelled"
