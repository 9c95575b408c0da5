"""Waiting for work to its end even when cancelled, since it uses memory that the caller will reuse."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_to_end(futures: Iterable["asyncio.Future[Any]"]) -> None:
    """Return once all have ended, however; cancellation is raised only then."""
    left = {future for future in futures if not future.done()}
    cancelled: asyncio.CancelledError | None = None
    while left:
        try:
            _, left = await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
            left = {future for future in left if not future.done()}
    if cancelled is not None:
        raise cancelled


async def run_in_thread(executor: Executor | None, work: Callable[[], T]) -> T:
    """Run `work` in `executor` (None: the loop's), which cannot be stopped: it is always waited for."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        await wait_to_end([future])
    except asyncio.CancelledError:
        future.exception()  # seen, though of no interest any more
        raise
    return future.result()
