"""How long tests wait for what must come, however slow and busy the machine is."""

import asyncio
from collections.abc import Callable
from itertools import count

# What has not come by then hangs: this ends a test that fails, and measures nothing.
PATIENCE_S = 120.0


async def until(holds: Callable[[], bool]) -> None:
    """Let the event loop go on until something holds of which nobody is told."""
    for _ in count():
        if holds():
            return
        await asyncio.sleep(0)
