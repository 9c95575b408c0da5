"""Work that a cancellation does not stop: the caller waits for it, and is cancelled after it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Steadfast(asyncio.Future[None]):
    """A future whose waiter stays: asyncio keeps a cancellation that it does not take until it is done."""

    def cancel(self, msg: Any = None) -> bool:
        return False

    def finish(self, _: asyncio.Future[Any]) -> None:
        self.set_result(None)


async def see_out(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `work` is done, whatever comes of it; a cancellation that came meanwhile is returned."""
    if not work.done():
        done = _Steadfast()
        work.add_done_callback(done.finish)
        try:
            await done
        except asyncio.CancelledError as error:
            return error
    return None


async def outlast(work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Run bounded work to its end. A cancellation that comes meanwhile is raised then."""
    task = asyncio.ensure_future(work)
    cancelled = await see_out(task)
    if cancelled is not None:
        raise cancelled
    return task.result()
