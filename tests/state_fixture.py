"""A scenario of a State, and waits for what it tells, for tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from registry.change import Change
from registry.errors import StateUnavailable
from registry.state import State
from tests.patience import PATIENCE_S

Scenario = Callable[[State], Awaitable[None]]
# Returns once a record that was to live for LAPSE_S is over.
Lapse = Callable[[], Awaitable[None]]
LapsingScenario = Callable[[State, Lapse], Awaitable[None]]
FEED_LENGTH = 200  # changes that the feed keeps
LAPSE_S = 0.05


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


async def connected(state: State) -> None:
    """Wait until it answers: one of little patience may have to ask more than once on a busy machine."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await state.ping()
            except StateUnavailable:
                pass


@asynccontextmanager
async def expiries(redis_url: str) -> AsyncIterator[Lapse]:
    """Each call returns once Redis tells of another key, of those since the begin, that it has expired."""
    async with Redis.from_url(redis_url) as redis, redis.pubsub() as heard:
        await redis.config_set("notify-keyspace-events", "Ex")
        await heard.psubscribe("__keyevent@*__:expired")
        messages = heard.listen()
        assert (await anext(messages))["type"] == "psubscribe"

        async def lapse() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await anext(messages)

        yield lapse
