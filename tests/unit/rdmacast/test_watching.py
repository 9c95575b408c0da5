"""How often a peer reports what it holds: at once when asked, else a few times a second, all in the end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from rdmacast.bitfield import Bitfield
from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.cast.watch_link import RegionWatch, WatchLink
from rdmacast.errors import CastError, RegionGone
from rdmacast.protocol.frames import Error, ErrorCode, Replan
from rdmacast.protocol.pull_report import StragglerVerdict
from rdmacast.server.bitfield_source import WholeSource
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from tests.fixtures.cast import LINK, SECRET, no_faults

BLOCK_BYTES, BLOCKS = 100, 2000
NBYTES = BLOCK_BYTES * BLOCKS
NEWS_S = 0.1  # between two maps
KINDS = ["tcp", "tcp-uvloop"]


class Heard:
    """What was reported, and when the first watch was asked for."""

    def __init__(self) -> None:
        self.maps: list[Bitfield] = []
        self.answers: list[int] = []
        self.began_s = asyncio.get_running_loop().time()
        self._news = asyncio.Event()

    def __call__(self, reported: Bitfield, answers: int) -> None:
        self.maps.append(reported)
        self.answers.append(answers)
        self._news.set()

    @property
    def held(self) -> int:
        return self.maps[-1].held.bit_count() if self.maps else 0

    async def first(self) -> None:
        while not self.maps:
            await self._news.wait()

    async def until(self, held: int) -> None:
        while self.held < held:
            self._news.clear()
            await self._news.wait()

    async def answered(self, number: int) -> None:
        while number not in self.answers:
            self._news.clear()
            await self._news.wait()

    @property
    def most(self) -> int:
        """Maps that there may be by now besides answers, however slow the machine is."""
        pauses = (asyncio.get_running_loop().time() - self.began_s) / NEWS_S
        return int(round(pauses, 6)) + 1  # a pause of 0.1 s may be 0.0999… s in floats


@asynccontextmanager
async def watched(region: GrowingRegion) -> AsyncIterator[tuple[Heard, RegionWatch]]:
    async with no_faults(), RegionServer(SECRET, settings=LINK) as server:
        server.publish("image", region)
        heard = Heard()
        watcher = RegionWatcher(SECRET, settings=LINK)
        async with watcher.watch(server.address, "image", BLOCK_BYTES, heard) as watch:
            yield heard, watch


def mark_each(region: GrowingRegion, block: int) -> None:
    """Mark this block and those behind it, each in its own iteration of the event loop."""
    region.mark(block * BLOCK_BYTES, BLOCK_BYTES)
    if block + 1 < BLOCKS:
        asyncio.get_running_loop().call_soon(mark_each, region, block + 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_many_changes_become_few_maps_and_the_last_shows_all(kind: str) -> None:
    region = GrowingRegion(bytes(NBYTES))
    async with watched(region) as (heard, _):
        await heard.first()
        mark_each(region, 0)
        await heard.until(BLOCKS)
        assert len(heard.maps) <= heard.most
        seen = [reported.held for reported in heard.maps]
        assert all(before & after == before for before, after in pairwise(seen))


@pytest.mark.parametrize("kind", KINDS)
async def test_one_change_is_told_without_another_and_nothing_without_one(kind: str) -> None:
    region = GrowingRegion(bytes(NBYTES))
    async with watched(region) as (heard, watch):
        for block in range(4):
            region.mark(block * BLOCK_BYTES, BLOCK_BYTES)
            await heard.until(block + 1)
        assert len(heard.maps) <= 5  # and the first, of what there was
        watch.request_have(1)
        await heard.answered(1)
        assert len(heard.maps) <= 6


@pytest.mark.parametrize("kind", KINDS)
async def test_a_question_is_answered_by_the_map_of_now_whatever_the_pace(kind: str) -> None:
    region = GrowingRegion(bytes(NBYTES))
    async with watched(region) as (heard, watch):
        for number in range(1, 201):
            region.mark((number - 1) * BLOCK_BYTES, BLOCK_BYTES)
            watch.request_have(number)
            await heard.answered(number)
            assert heard.maps[heard.answers.index(number)].held.bit_count() >= number
        # Each answer was reported when it was asked for, and besides them no more than the pace allows.
        assert sum(answers == 0 for answers in heard.answers) <= heard.most


@pytest.mark.parametrize("kind", KINDS)
async def test_of_questions_that_come_together_the_latest_is_answered(kind: str) -> None:
    region = GrowingRegion(bytes(NBYTES))
    async with watched(region) as (heard, watch):
        for number in range(1, 101):
            watch.request_have(number)
        await heard.answered(100)
        assert heard.answers == sorted(heard.answers)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_region_that_is_withdrawn_ends_its_watch_though_news_were_due(kind: str) -> None:
    region = GrowingRegion(bytes(NBYTES))
    async with RegionServer(SECRET, settings=LINK) as server:
        server.publish("image", region)
        heard = Heard()
        async with RegionWatcher(SECRET, settings=LINK).watch(
            server.address, "image", BLOCK_BYTES, heard
        ) as watch:
            await heard.first()
            region.mark(0, BLOCK_BYTES)  # to be reported in a while
            await server.withdraw("image")
            reason: CastError = await watch.wait_ended()
            assert isinstance(reason, RegionGone)


async def test_a_verdict_that_was_sent_after_the_end_of_its_watch_is_ignored() -> None:
    verdicts: list[StragglerVerdict] = []
    link = WatchLink(LINK, lambda _: None)
    watch = link.open("image", BLOCK_BYTES, Heard(), verdicts.append)
    link.frame_received(Replan(1, StragglerVerdict(plan=1, slow=(3,))))
    link.frame_received(Error(1, ErrorCode.REGION_GONE, "withdrawn"))
    link.frame_received(Replan(1, StragglerVerdict(plan=2, slow=(3,))))
    assert isinstance(await watch.wait_ended(), RegionGone)
    assert [verdict.plan for verdict in verdicts] == [1] and link.reason is None


class Arriving:
    """A RegionSource that can only be waited for."""

    def __init__(self) -> None:
        self.nbytes, self.shm_path = NBYTES, None
        self.arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited = asyncio.Event()

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(bytes(nbytes))

    async def wait_for(self, offset: int, nbytes: int) -> None:
        self.awaited.set()
        await asyncio.shield(self.arrived)


@pytest.mark.parametrize("comes", [True, False])
async def test_what_can_only_be_waited_for_is_told_when_it_is_there_or_will_not_be(comes: bool) -> None:
    source = Arriving()
    teller, news = WholeSource(source), asyncio.Event()
    everything = (1 << BLOCKS) - 1
    with teller.watch(news.set):
        reported = teller.bitfield(BLOCK_BYTES)
        assert (reported.held, reported.pending) == (0, everything)
        if comes:
            source.arrived.set_result(None)
        else:
            source.arrived.set_exception(RegionGone("lost"))
        await news.wait()
        reported = teller.bitfield(BLOCK_BYTES)
        assert (reported.held, reported.pending) == (everything if comes else 0, 0)


async def test_nobody_is_told_of_what_was_only_watched_no_more() -> None:
    source, calls, before = Arriving(), list[None](), asyncio.all_tasks()
    teller = WholeSource(source)
    with teller.watch(lambda: calls.append(None)):
        await source.awaited.wait()
    if waiting := asyncio.all_tasks() - before:
        await asyncio.wait(waiting)  # nobody waits for it any more
    source.arrived.set_result(None)
    assert not calls and "coming" in repr(teller)
