"""Concurrent coroutines that fail as one."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class PartCancelled(RuntimeError):
    """One of several coroutines ended cancelled, although their caller was not."""


async def run_all(*works: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently; if one fails, cancel the others and raise its exception itself.

    asyncio.TaskGroup raises a group of exceptions, and ignores a part that is cancelled from elsewhere: that
    raises PartCancelled here.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    if any(task.cancelled() for task in tasks):
        raise PartCancelled("a part of the work was cancelled")


async def cancel_and_discard(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, wait until they have ended, and discard their results and exceptions."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; their results and exceptions are left to the caller."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
