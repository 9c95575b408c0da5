"""Waits and cleanup that a cancellation does not interrupt: it is raised when they have ended.

asyncio.shield leaves the work behind, running and without an owner. Here the caller waits for it, because the
work uses memory, files or sockets that are released afterwards. Only for work of bounded duration.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _Uncancellable(asyncio.Future[None]):
    """A future that refuses cancellation, so that asyncio delivers it to the waiter after the result."""

    def cancel(self, msg: Any = None) -> bool:
        return False


class Shieldable(asyncio.Future[T]):
    """A future that `wait_shielded` waits for directly: it refuses cancellation meanwhile."""

    is_shielded = False

    def cancel(self, msg: Any = None) -> bool:
        return not self.is_shielded and super().cancel(msg)


def abandon(work: asyncio.Future[Any]) -> None:
    """End a future that is waited for, also if it is shielded: with TimeoutError then, else cancelled."""
    if isinstance(work, Shieldable) and work.is_shielded:
        if not work.done():
            work.set_exception(TimeoutError())
    else:
        work.cancel()


def wait_shielded(*works: asyncio.Future[Any]) -> Coroutine[Any, Any, asyncio.CancelledError | None]:
    """Wait until all of `works` have ended; return a cancellation that arrived meanwhile.

    Results and exceptions are left to the caller.
    """
    if len(works) == 1 and isinstance(works[0], Shieldable):
        return _wait_for(works[0])
    return _wait_for_all(works)


async def _wait_for_all(works: Iterable[asyncio.Future[Any]]) -> asyncio.CancelledError | None:
    running = {work for work in works if not work.done()}
    if not running:
        return None
    ended = _Uncancellable()

    def on_done(work: asyncio.Future[Any]) -> None:
        running.discard(work)
        if not running:
            ended.set_result(None)

    for work in tuple(running):
        work.add_done_callback(on_done)
    try:
        await ended
    except asyncio.CancelledError as error:
        return error
    return None


async def _wait_for(work: Shieldable[Any]) -> asyncio.CancelledError | None:
    if work.done():
        return None
    work.is_shielded = True
    try:
        await work
    except asyncio.CancelledError as error:
        return error
    except Exception:  # whatever the work raises stays in it, for the caller to retrieve
        pass
    finally:
        work.is_shielded = False
    return None


async def join_shielded(works: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all of `works` have ended, in any way; then raise a cancellation that arrived meanwhile."""
    cancelled = await wait_shielded(*works)
    if cancelled is not None:
        raise cancelled


async def run_shielded(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Run work to its end and return its result; raise a cancellation that arrived meanwhile instead."""
    future = asyncio.ensure_future(work)
    cancelled = await wait_shielded(future)
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # marks it as retrieved
        raise cancelled
    return future.result()


@asynccontextmanager
async def shielded_stack() -> AsyncIterator[AsyncExitStack]:
    """Yield an exit stack, the cleanup of which completes even if its task is cancelled meanwhile."""
    stack = AsyncExitStack()
    try:
        yield stack
    finally:
        await run_shielded(stack.aclose())
