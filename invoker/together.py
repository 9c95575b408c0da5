"""Running a few coroutines as one, and letting go of what was taken together."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from invoker.errors import StartFailed


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run them all at once; when one fails the others are cancelled and its exception is raised bare.

    One that ends cancelled though nobody cancelled this call did not do its work: StartFailed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    if any(task.cancelled() for task in tasks):  # of which a group says nothing
        raise StartFailed("a part of the work was cancelled")


@asynccontextmanager
async def let_go_whole() -> AsyncIterator[AsyncExitStack]:
    """A stack that is unwound to its end, however often its task is cancelled meanwhile: what works on
    memory or a socket ends before that is freed. For what ends in bounded time only."""
    stack = AsyncExitStack()
    try:
        yield stack
    finally:
        unwinding = asyncio.ensure_future(stack.aclose())
        cancelled: asyncio.CancelledError | None = None
        while not unwinding.done():
            try:
                await asyncio.wait([unwinding])
            except asyncio.CancelledError as error:
                cancelled = error
        unwinding.result()
        if cancelled is not None:
            raise cancelled
