"""Work that a cancellation does not stop: the caller waits for it, and is cancelled after it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def outlast(work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """Run bounded work to its end. A cancellation that comes meanwhile is raised then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
