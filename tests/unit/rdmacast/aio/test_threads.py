"""Work in threads, and concurrent work, when the caller or a part is cancelled."""

import asyncio
import threading

import pytest

from rdmacast.aio.groups import PartCancelled, cancel_and_wait, run_all
from rdmacast.aio.threads import run_in_daemon_thread, run_in_thread
from tests.fixtures.patience import PATIENCE_S


async def test_a_cancelled_caller_waits_for_a_thread_but_not_for_a_daemon_thread() -> None:
    loop = asyncio.get_running_loop()
    started, go_on, undone, ended = asyncio.Event(), threading.Event(), [], []

    def work() -> str:
        loop.call_soon_threadsafe(started.set)
        go_on.wait()
        ended.append("thread")
        return "late"

    task = asyncio.create_task(run_in_thread(work, undo=undone.append))
    task.add_done_callback(lambda _: ended.append("caller"))
    await started.wait()
    task.cancel()
    await run_in_thread(lambda: None)  # in which it would leave
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled() and undone == ["late"]
    assert ended == ["thread", "caller"], "a cancelled caller waits for the thread"

    go_on.clear()
    started.clear()
    own = asyncio.create_task(run_in_daemon_thread(work))
    await started.wait()
    own.cancel()
    await asyncio.wait([own], timeout=PATIENCE_S)
    assert own.cancelled(), "a caller of an unbounded wait leaves at once"
    go_on.set()


async def test_concurrent_work_fails_where_a_part_was_cancelled_from_elsewhere() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(PartCancelled, match="was cancelled"):
        await run_all(cancelled(), asyncio.sleep(0))


async def test_cancelled_tasks_are_waited_for_to_their_ends() -> None:
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(3)]
    await asyncio.sleep(0)
    await cancel_and_wait(*tasks)
    assert sorted(ended) == [0, 1, 2] and all(task.cancelled() for task in tasks)
    await cancel_and_wait()
