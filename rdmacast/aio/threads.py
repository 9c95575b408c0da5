"""Blocking work in threads, with defined behaviour on cancellation."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from rdmacast.aio.shielded import wait_shielded

T = TypeVar("T")


async def run_in_thread(
    function: Callable[..., T],
    *args: object,
    executor: Executor | None = None,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Run `function(*args)` in a worker thread; a cancelled caller still waits until it returns.

    When this returns or raises, buffers and files passed to the function belong to the caller again; the
    result of a cancelled call is passed to `undo`. Only for work of bounded duration. `executor` is that of
    the loop by default.
    """
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(executor, lambda: function(*args))
    cancelled = await wait_shielded(future)
    if cancelled is not None:
        if not future.cancelled() and future.exception() is None and undo is not None:
            undo(future.result())
        raise cancelled
    return future.result()


async def run_in_daemon_thread(function: Callable[..., None], *args: object) -> None:
    """Run a function that may block without bound; a cancelled caller leaves its thread behind.

    The thread does not delay exit. The function must own all that it uses.
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
        except BaseException as raised:  # re-raised in the caller
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name=f"daemon-{function.__name__}", daemon=True).start()
    await done
