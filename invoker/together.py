"""Running a few coroutines as one."""

import asyncio
from collections.abc import Coroutine
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
