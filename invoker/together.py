"""Running a few coroutines as one."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run them all at once; when one fails the others are cancelled and its exception is raised bare."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
