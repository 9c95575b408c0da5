"""Page-locked memory, lent in ranges."""

import asyncio
import mmap
import random

import pytest

from invoker.base.errors import OutOfPinnedMemory
from invoker.memory.pinned_pool import PinnedPool
from tests.fixtures.patience import until

PAGE = mmap.PAGESIZE


def pool_of(pages: int) -> PinnedPool:
    return PinnedPool(memoryview(mmap.mmap(-1, pages * PAGE)))


async def test_ranges_begin_at_pages_and_do_not_overlap() -> None:
    pool = pool_of(4)
    async with pool.lend(100) as first, pool.lend(PAGE + 1) as second:
        first[:], second[:] = b"a" * 100, b"b" * (PAGE + 1)
        assert bytes(first) == b"a" * 100 and len(second) == PAGE + 1
        assert pool.free_bytes == PAGE
    assert pool.free_bytes == pool.capacity_bytes == 4 * PAGE


async def test_more_than_there_is_is_refused_at_once() -> None:
    pool = pool_of(2)
    with pytest.raises(OutOfPinnedMemory, match="8193 bytes at once do not fit the pinned memory of 8192"):
        async with pool.lend(2 * PAGE + 1):
            pass
    assert pool.free_bytes == 2 * PAGE


async def test_requests_are_served_in_their_order_however_small_the_next_one_is() -> None:
    pool, served = pool_of(2), list[str]()

    async def take(name: str, pages: int, release: asyncio.Event) -> None:
        async with pool.lend(pages * PAGE):
            served.append(name)
            await release.wait()

    first, rest = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(take("a", 1, first))
        tasks.create_task(take("b", 2, rest))
        tasks.create_task(take("c", 1, rest))
        await until(lambda: pool.waiting == 2)
        assert served == ["a"], "one page is free, but its turn has not come"
        first.set()
        rest.set()
    assert served == ["a", "b", "c"] and pool.free_bytes == 2 * PAGE


async def test_a_cancelled_request_lets_the_next_one_through_and_keeps_nothing() -> None:
    pool = pool_of(2)
    async with pool.lend(PAGE):
        large = asyncio.create_task(pool.lend(2 * PAGE).__aenter__())
        lending = pool.lend(PAGE)
        small = asyncio.create_task(lending.__aenter__())
        await until(lambda: pool.waiting == 2)
        assert not small.done()
        large.cancel()
        await asyncio.wait([large, small])
        assert small.done() and not pool.free_bytes
        await lending.__aexit__(None, None, None)
    assert pool.free_bytes == 2 * PAGE


async def test_a_request_that_is_cancelled_as_it_is_served_gives_its_range_back() -> None:
    pool = pool_of(1)
    holding = pool.lend(PAGE)
    await holding.__aenter__()
    waiting = asyncio.create_task(pool.lend(PAGE).__aenter__())
    await until(lambda: pool.waiting == 1)
    await holding.__aexit__(None, None, None)
    waiting.cancel()  # it has its range, and has not run since
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.free_bytes == PAGE


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_lost_or_lent_twice_whatever_is_cancelled(seed: int) -> None:
    dice, pool, lent = random.Random(seed), pool_of(16), list[memoryview]()

    async def use(number: int) -> None:
        async with pool.lend(dice.randrange(1, 8 * PAGE)) as view:
            view[:] = bytes([number]) * len(view)
            lent.append(view)
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            assert bytes(view) == bytes([number]) * len(view)
            pool.check_integrity()

    tasks = [asyncio.create_task(use(number)) for number in range(60)]
    for task in dice.sample(tasks, 20):
        await asyncio.sleep(0)
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert result is None or isinstance(result, asyncio.CancelledError), result
    assert len(lent) >= 40 and pool.free_bytes == pool.capacity_bytes
