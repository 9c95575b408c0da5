"""Blocking work off the event loop, with honest cancellation."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(
    function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None
) -> T:
    """Run `function(*args)` in a worker thread; a cancelled caller still waits for its end.

    So a buffer or a file that the function works on is the caller's again once this returns or
    raises, whatever happens; what it acquired for a caller that is gone, `undo` gives back. For work
    of bounded length only.
    """
    future = asyncio.get_running_loop().run_in_executor(None, lambda: function(*args))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled() and future.exception() is None and undo is not None:
            undo(future.result())
        raise


async def in_own_thread(function: Callable[..., None], *args: object) -> None:
    """Run a function that may block without bound; a cancelled caller leaves it behind.

    The thread is a daemon, so it holds up no exit, and the function must own all that it works on.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            function(*args)
        except BaseException as raised:  # handed to who waits
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name=f"own-{function.__name__}", daemon=True).start()
    await done
