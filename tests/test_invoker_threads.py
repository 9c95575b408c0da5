"""Work in threads, and work done together, when its caller leaves or a part is cancelled."""

import asyncio
import threading

import pytest

from invoker.errors import StartFailed
from invoker.threads import in_own_thread, in_thread
from invoker.together import together
from tests.patience import PATIENCE_S


def test_cancelled_work_in_threads() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        started, go_on, undone, ended = asyncio.Event(), threading.Event(), [], []

        def work() -> str:
            loop.call_soon_threadsafe(started.set)
            go_on.wait()
            ended.append("thread")
            return "late"

        task = asyncio.create_task(in_thread(work, undo=undone.append))
        task.add_done_callback(lambda _: ended.append("caller"))
        await started.wait()
        task.cancel()
        await in_thread(lambda: None)  # in which it would leave
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled() and undone == ["late"]
        assert ended == ["thread", "caller"], "a cancelled caller waits for the thread"

        go_on.clear()
        started.clear()
        own = asyncio.create_task(in_own_thread(work))
        await started.wait()
        own.cancel()
        await asyncio.wait([own], timeout=PATIENCE_S)
        assert own.cancelled(), "a caller of an unbounded wait leaves at once"
        go_on.set()

    asyncio.run(scenario())


def test_work_done_together_fails_where_a_part_was_cancelled_from_elsewhere() -> None:
    async def scenario() -> None:
        async def cancelled() -> None:
            raise asyncio.CancelledError

        with pytest.raises(StartFailed, match="was cancelled"):
            await together(cancelled(), asyncio.sleep(0))

    asyncio.run(scenario())
