"""Places of a key's requests while Redis' clock is set."""

from dataclasses import replace

import pytest

from registry import keys
from registry.clock import FakeClock
from registry.memory.state import MemoryState
from registry.records.api_key import ApiKey, KeyRole
from registry.records.quota import MAX_CONCURRENCY_LEASE_S, ConcurrencyLease, RateLimitOutcome
from registry.redis.connections import ConnectionPool
from registry.redis.state import RedisState
from registry.state import State

KEY = ApiKey(
    id="k0", digest="d", tenant="acme", role=KeyRole.CALLER, name="", created_at=1.0, max_concurrent=2
)
NOW = 1_795_000_000.0
TTL_S = 15.0


async def verdict(state: State, place: str, asked: ApiKey = KEY) -> RateLimitOutcome:
    return (await state.admit(asked, place, ttl_s=TTL_S, now=NOW)).outcome


async def _moved(connections: ConnectionPool, by_ms: int) -> dict[str, int]:
    """Have the places lapse so much later, as if the clock went back; returns when they do (ms)."""
    flat = await connections.call("ZRANGE", keys.concurrency("k0"), 0, -1, "WITHSCORES")
    places = {
        name.decode(): int(float(score)) + by_ms for name, score in zip(flat[::2], flat[1::2], strict=True)
    }
    for name, score in places.items():
        await connections.call("ZADD", keys.concurrency("k0"), score, name)
    return places


async def test_places_of_a_dead_gateway_lapse_though_redis_clock_went_back(redis_url: str) -> None:
    connections = ConnectionPool(redis_url)
    await connections.call("FLUSHALL")
    async with RedisState.connect(redis_url) as state:
        assert [await verdict(state, name) for name in ("dead", "alive")] == [RateLimitOutcome.ADMITTED] * 2
        await _moved(connections, 3_600_000)
        assert await verdict(state, "more") is RateLimitOutcome.BUSY
        lapses_at = (await _moved(connections, 0))["dead"]
        seconds, _ = await connections.call("TIME")
        assert lapses_at <= (int(seconds) + 1 + MAX_CONCURRENCY_LEASE_S) * 1000
        assert (
            await verdict(state, "more") is RateLimitOutcome.BUSY
        )  # a request that comes later does not keep it
        passed_ms = MAX_CONCURRENCY_LEASE_S * 1000
        assert (await _moved(connections, -passed_ms))["dead"] == lapses_at - passed_ms
        await state.renew_concurrency_leases([ConcurrencyLease(key_id="k0", id="alive")], ttl_s=TTL_S)
        assert await verdict(state, "more") is RateLimitOutcome.ADMITTED
        assert await verdict(state, "yet more") is RateLimitOutcome.BUSY
    await connections.aclose()


async def test_places_of_the_living_count_again_soon_after_redis_clock_went_ahead(redis_url: str) -> None:
    connections = ConnectionPool(redis_url)
    await connections.call("FLUSHALL")
    async with RedisState.connect(redis_url) as state:
        assert [await verdict(state, name) for name in ("a", "b")] == [RateLimitOutcome.ADMITTED] * 2
        await _moved(connections, -3_600_000)
        places = [ConcurrencyLease(key_id="k0", id=name) for name in ("a", "b")]
        await state.renew_concurrency_leases(places, ttl_s=TTL_S)
        assert await verdict(state, "more") is RateLimitOutcome.BUSY
        await state.release_concurrency_leases(places)
        assert await verdict(state, "more") is RateLimitOutcome.ADMITTED
    await connections.aclose()


@pytest.mark.parametrize("step_s", [-3600, 3600])
async def test_in_memory_too(step_s: int) -> None:
    clock = FakeClock()
    clock.advance(7200)
    state = MemoryState(clock=clock)
    one = replace(KEY, max_concurrent=1)
    assert await verdict(state, "dead", one) is RateLimitOutcome.ADMITTED
    clock.advance(step_s)
    assert await verdict(state, "next", one) is (
        RateLimitOutcome.BUSY if step_s < 0 else RateLimitOutcome.ADMITTED
    )
    clock.advance(MAX_CONCURRENCY_LEASE_S)
    assert await verdict(state, "later", one) is RateLimitOutcome.ADMITTED
