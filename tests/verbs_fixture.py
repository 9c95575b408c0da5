"""What tests of RDMA share: whether this machine has a device, and how to wait for what no event tells."""

import asyncio
from collections.abc import Callable
from functools import cache
from itertools import count

from rdmacast.errors import NoTransport
from rdmacast.verbs_node import open_node


@cache
def why_no_rdma() -> str:
    """Empty where there is a device that can be used."""
    try:
        open_node().close()
    except NoTransport as error:
        return str(error)
    return ""


async def until(holds: Callable[[], bool]) -> None:
    """Let the event loop go on until something holds of which nobody is told."""
    for _ in count():
        if holds():
            return
        await asyncio.sleep(0)
