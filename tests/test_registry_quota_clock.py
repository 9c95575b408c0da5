"""Places of a key's requests while Redis' clock is set."""

import asyncio
from dataclasses import replace

import pytest

from registry import keys
from registry.api_key import ApiKey, Role
from registry.clock import FakeClock
from registry.memory_state import MemoryState
from registry.quota import LONGEST_PLACE_S, Place, Verdict
from registry.redis_connections import Connections
from registry.redis_state import RedisState
from registry.state import State

KEY = ApiKey(id="k0", digest="d", tenant="acme", role=Role.CALLER, name="", created_at=1.0, max_concurrent=2)
NOW = 1_795_000_000.0
TTL_S = 15.0


async def verdict(state: State, place: str, asked: ApiKey = KEY) -> Verdict:
    return (await state.admit(asked, place, ttl_s=TTL_S, now=NOW)).verdict


async def _moved(connections: Connections, by_ms: int) -> dict[str, int]:
    """Have the places lapse so much later, as if the clock went back; returns when they do (ms)."""
    flat = await connections.call("ZRANGE", keys.places("k0"), 0, -1, "WITHSCORES")
    places = {
        name.decode(): int(float(score)) + by_ms for name, score in zip(flat[::2], flat[1::2], strict=True)
    }
    for name, score in places.items():
        await connections.call("ZADD", keys.places("k0"), score, name)
    return places


def test_places_of_a_dead_gateway_lapse_though_redis_clock_went_back(redis_url: str) -> None:
    async def main() -> None:
        connections = Connections(redis_url)
        await connections.call("FLUSHALL")
        async with RedisState.connect(redis_url) as state:
            assert [await verdict(state, name) for name in ("dead", "alive")] == [Verdict.ADMITTED] * 2
            await _moved(connections, 3_600_000)
            assert await verdict(state, "more") is Verdict.BUSY
            lapses_at = (await _moved(connections, 0))["dead"]
            seconds, _ = await connections.call("TIME")
            assert lapses_at <= (int(seconds) + 1 + LONGEST_PLACE_S) * 1000
            assert await verdict(state, "more") is Verdict.BUSY  # a request that comes later does not keep it
            passed_ms = LONGEST_PLACE_S * 1000
            assert (await _moved(connections, -passed_ms))["dead"] == lapses_at - passed_ms
            await state.keep_places([Place(key_id="k0", id="alive")], ttl_s=TTL_S)
            assert await verdict(state, "more") is Verdict.ADMITTED
            assert await verdict(state, "yet more") is Verdict.BUSY
        await connections.aclose()

    asyncio.run(main())


def test_places_of_the_living_count_again_soon_after_redis_clock_went_ahead(redis_url: str) -> None:
    async def main() -> None:
        connections = Connections(redis_url)
        await connections.call("FLUSHALL")
        async with RedisState.connect(redis_url) as state:
            assert [await verdict(state, name) for name in ("a", "b")] == [Verdict.ADMITTED] * 2
            await _moved(connections, -3_600_000)
            places = [Place(key_id="k0", id=name) for name in ("a", "b")]
            await state.keep_places(places, ttl_s=TTL_S)
            assert await verdict(state, "more") is Verdict.BUSY
            await state.release_places(places)
            assert await verdict(state, "more") is Verdict.ADMITTED
        await connections.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_in_memory_too(step_s: int) -> None:
    async def main() -> None:
        clock = FakeClock()
        clock.advance(7200)
        state = MemoryState(clock=clock)
        one = replace(KEY, max_concurrent=1)
        assert await verdict(state, "dead", one) is Verdict.ADMITTED
        clock.advance(step_s)
        assert await verdict(state, "next", one) is (Verdict.BUSY if step_s < 0 else Verdict.ADMITTED)
        clock.advance(LONGEST_PLACE_S)
        assert await verdict(state, "later", one) is Verdict.ADMITTED

    asyncio.run(main())
