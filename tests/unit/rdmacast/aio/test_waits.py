"""Time limits, coroutines started at once, and work that outlasts a cancellation."""

import asyncio
from collections.abc import Callable

import pytest

from rdmacast.aio.eager import StartedCoroutine, run_within, start_eagerly
from rdmacast.aio.shielded import run_shielded, wait_shielded
from rdmacast.aio.time_limit import TimeLimit


async def settle_in() -> None:
    """Let the tasks that were made run up to their first wait."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_time_limit_ends_a_wait_and_leaves_the_task_as_it_was() -> None:
    for _ in range(2):
        with pytest.raises(TimeoutError):
            with TimeLimit(0):
                await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    with TimeLimit(60):
        await asyncio.sleep(0)


async def test_a_cancellation_goes_through_a_time_limit() -> None:
    async def work() -> None:
        with TimeLimit(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await settle_in()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_inner_limit_is_not_taken_for_the_outer_one() -> None:
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            with TimeLimit(0):
                await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        with TimeLimit(0):
            with TimeLimit(60):
                await asyncio.Event().wait()


async def test_what_need_not_wait_is_over_when_it_was_begun() -> None:
    async def at_once() -> int:
        return 1

    async def fails() -> int:
        raise ValueError

    assert start_eagerly(at_once()) == 1
    with pytest.raises(ValueError):
        start_eagerly(fails())

    gone_on = asyncio.Event()

    async def later() -> int:
        await gone_on.wait()
        await asyncio.sleep(0)
        return 2

    rest = start_eagerly(later())
    assert isinstance(rest, StartedCoroutine)
    gone_on.set()
    assert await rest == 2
    with pytest.raises(TimeoutError):
        await run_within(0, asyncio.Event().wait())


@pytest.mark.parametrize("cancels", [0, 1, 3])
async def test_work_that_outlasts_is_done_when_its_caller_hears_of_the_cancellation(cancels: int) -> None:
    may_end = asyncio.Event()
    done: list[str] = []

    async def work() -> str:
        await may_end.wait()
        done.append("work")
        return "result"

    async def caller() -> str:
        try:
            return await run_shielded(work())
        finally:
            done.append("caller")

    task = asyncio.create_task(caller())
    await settle_in()
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
    assert not done
    may_end.set()
    if cancels:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task == "result"
    assert done == ["work", "caller"]


@pytest.mark.parametrize(
    "end",
    [
        lambda work: work.set_result(None),
        lambda work: work.set_exception(ValueError()),
        lambda work: work.cancel(),
    ],
)
async def test_seeing_out_raises_nothing(end: Callable[[asyncio.Future[None]], None]) -> None:
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(wait_shielded(work))
    await settle_in()
    end(work)
    assert await task is None
    assert await wait_shielded(work) is None
    if not work.cancelled():
        work.exception()
