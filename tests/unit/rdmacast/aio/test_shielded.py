"""Things that were taken together are let go of whole, whatever happens meanwhile."""

import asyncio

import pytest

from rdmacast.aio.shielded import shielded_stack


async def _turn_of_the_loop() -> None:
    """Until all that was due before it has run: a cancellation has arrived, and what follows it too."""
    for _ in range(3):
        turned = asyncio.Event()
        asyncio.get_running_loop().call_soon(turned.set)
        await turned.wait()


async def test_what_is_let_go_of_ends_in_order_however_often_it_is_cancelled() -> None:
    ended: list[str] = []
    entered, began, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def end_step() -> None:
        began.set()
        await may_end.wait()
        ended.append("step")

    async def work() -> None:
        async with shielded_stack() as stack:
            stack.callback(ended.append, "memory")
            stack.push_async_callback(end_step)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    await began.wait()
    for _ in range(3):
        task.cancel()
        await _turn_of_the_loop()
        assert ended == [] and not task.done()
    may_end.set()
    await asyncio.wait([task])
    assert ended == ["step", "memory"]
    assert task.cancelled()


async def test_a_fault_goes_on_after_all_is_let_go_of() -> None:
    ended: list[str] = []
    with pytest.raises(ValueError, match="why"):
        async with shielded_stack() as stack:
            stack.callback(ended.append, "memory")
            raise ValueError("why")
    assert ended == ["memory"]


async def test_a_fault_of_the_end_itself_is_told() -> None:
    async def fail() -> None:
        raise ValueError("the end failed")

    with pytest.raises(ValueError, match="the end failed"):
        async with shielded_stack() as stack:
            stack.push_async_callback(fail)
