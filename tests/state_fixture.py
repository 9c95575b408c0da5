"""A scenario of a State, and waits for what it tells, for tests."""

import asyncio
from collections.abc import Awaitable, Callable

from registry.change import Change
from registry.state import State
from tests.patience import PATIENCE_S

Scenario = Callable[[State], Awaitable[None]]
FEED_LENGTH = 200  # changes that the feed keeps


async def after(state: State, cursor: str, count: int) -> list[Change]:
    """The next `count` changes after a cursor."""
    found: list[Change] = []
    feed = state.watch(cursor)
    async with asyncio.timeout(PATIENCE_S):
        async for _, change in feed:
            found.append(change)
            if len(found) == count:
                break
    await feed.aclose()  # type: ignore[attr-defined]
    return found


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when the condition holds: of an expiry there is no other sign than that it shows."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.002)
