"""What every State promises of quotas, asked of the one in Redis and of the one in memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import keys
from registry.clock import FakeClock
from registry.errors import Conflict, InvalidRecord, NotFound, StateUnavailable
from registry.memory.state import MemoryState
from registry.records.api_key import ApiKey, KeyRole, SpendPeriod
from registry.records.quota import (
    UNITS,
    ConcurrencyLease,
    RateLimitDecision,
    RateLimitOutcome,
    SpendLimit,
    drained,
    full_in_ms,
    judge,
    money,
    parse_spend_limit,
    period_end,
    remaining,
    retry_in_s,
    spend_field,
)
from registry.redis.connections import ConnectionPool
from registry.redis.state import RedisState
from registry.state import State
from tests.fixtures.redis import RedisServer
from tests.fixtures.registry_records import request as record
from tests.fixtures.state import connected

Later = Callable[[float], Awaitable[None]]
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()


@pytest.fixture(params=["memory", "redis"])
async def seen(
    request: pytest.FixtureRequest, empty_redis_url: str
) -> AsyncIterator[tuple[State, State, Later]]:
    """Yield an empty state twice, as two gateways see it, and what lets so many seconds pass."""
    if request.param == "memory":
        clock = FakeClock()
        state = MemoryState(clock=clock)

        async def later(seconds: float) -> None:
            clock.advance(seconds)

        yield state, state, later
        return
    connections = ConnectionPool(empty_redis_url)
    async with RedisState.connect(empty_redis_url) as one, RedisState.connect(empty_redis_url) as other:
        yield one, other, partial(_grown_older, connections)
    await connections.aclose()


@pytest.fixture
def one(seen: tuple[State, State, Later]) -> State:
    return seen[0]


@pytest.fixture
def other(seen: tuple[State, State, Later]) -> State:
    return seen[1]


@pytest.fixture
def later(seen: tuple[State, State, Later]) -> Later:
    return seen[2]


async def _grown_older(connections: ConnectionPool, seconds: float) -> None:
    """Return what Redis knows of the key k0 is by so much older."""
    by_ms = int(seconds * 1000)
    if await connections.call("HEXISTS", keys.bucket("k0"), "at"):
        await connections.call("HINCRBY", keys.bucket("k0"), "at", -by_ms)
    for place in await connections.call("ZRANGE", keys.concurrency("k0"), 0, -1):
        await connections.call("ZINCRBY", keys.concurrency("k0"), -by_ms, place)


def key(**limits: object) -> ApiKey:
    made = ApiKey(id="k0", digest="d", tenant="acme", role=KeyRole.CALLER, name="", created_at=1.0)
    return replace(made, **limits)


async def verdict(
    state: State, asked: ApiKey, place: str, ttl_s: float = 60.0, now: float = NOW
) -> RateLimitOutcome:
    return (await state.admit(asked, place, ttl_s=ttl_s, now=now)).outcome


def places_of(*names: str) -> list[ConcurrencyLease]:
    return [ConcurrencyLease(key_id="k0", id=name) for name in names]


async def test_a_rate_is_exact_over_all_gateways(one: State, other: State, later: Later):
    asked, tries = key(requests_per_minute=120), 300
    began = time.monotonic()
    verdicts = await asyncio.gather(
        *(verdict((one, other)[n % 2], asked, f"p{n}", 60.0) for n in range(tries))
    )
    admitted = verdicts.count(RateLimitOutcome.ADMITTED)
    assert set(verdicts) == {RateLimitOutcome.ADMITTED, RateLimitOutcome.REQUESTS}
    assert 120 <= admitted <= 120 + 2 * (time.monotonic() - began) + 1
    refused = await one.admit(asked, "late", ttl_s=60, now=NOW)
    if refused.outcome is RateLimitOutcome.REQUESTS:
        assert 0 < retry_in_s(asked, refused, NOW) <= 0.5
    await later(0.5)
    assert await verdict(other, asked, "later") is RateLimitOutcome.ADMITTED


async def test_a_refused_request_counts_nowhere(one: State, other: State):
    asked = key(requests_per_minute=1, max_concurrent=5)
    first = await one.admit(asked, "a", ttl_s=60, now=NOW)
    assert (first.outcome, first.concurrent) == (RateLimitOutcome.ADMITTED, 1)
    assert 0 < first.requests_used <= UNITS
    for n in range(5):
        refused = await other.admit(asked, f"b{n}", ttl_s=60, now=NOW)
        assert (refused.outcome, refused.concurrent) == (RateLimitOutcome.REQUESTS, 1)
        assert 50 < retry_in_s(asked, refused, NOW) <= 60
        assert refused.requests_used <= first.requests_used


async def test_a_repetition_counts_once(one: State, other: State):
    asked = key(requests_per_minute=2, max_concurrent=2)
    assert await verdict(one, asked, "a") is RateLimitOutcome.ADMITTED
    for state in (one, other):
        again = await state.admit(asked, "a", ttl_s=60, now=NOW)
        assert (again.outcome, again.concurrent) == (RateLimitOutcome.ADMITTED, 1)
        assert again.requests_used <= UNITS
    assert await verdict(other, asked, "b") is RateLimitOutcome.ADMITTED
    assert await verdict(one, asked, "a") is RateLimitOutcome.ADMITTED


async def test_places_are_counted_across_gateways_and_given_back(one: State, other: State):
    asked = key(max_concurrent=3)
    verdicts = await asyncio.gather(*(verdict((one, other)[n % 2], asked, f"p{n}") for n in range(20)))
    assert verdicts.count(RateLimitOutcome.ADMITTED) == 3
    refused = await one.admit(asked, "x", ttl_s=60, now=NOW)
    assert (refused.outcome, refused.concurrent, retry_in_s(asked, refused, NOW)) == (
        RateLimitOutcome.BUSY,
        3,
        1.0,
    )
    held = f"p{verdicts.index(RateLimitOutcome.ADMITTED)}"
    await one.release_concurrency_leases(places_of(held, "nobody"))
    assert await verdict(other, asked, "x") is RateLimitOutcome.ADMITTED
    assert await verdict(one, asked, "y") is RateLimitOutcome.BUSY
    await other.release_concurrency_leases([])


async def test_places_that_nobody_keeps_lapse(one: State, other: State, later: Later):
    asked = key(max_concurrent=2)
    assert await verdict(one, asked, "kept", ttl_s=15.0) is RateLimitOutcome.ADMITTED
    assert await verdict(one, asked, "left", ttl_s=15.0) is RateLimitOutcome.ADMITTED
    await one.renew_concurrency_leases(places_of("kept"), ttl_s=60)
    assert await verdict(other, asked, "next") is RateLimitOutcome.BUSY
    await later(15.0)
    assert await verdict(other, asked, "next") is RateLimitOutcome.ADMITTED
    assert await verdict(other, asked, "more") is RateLimitOutcome.BUSY
    # Late is better than never: the request is still under way, so it counts again.
    await one.renew_concurrency_leases(places_of("left"), ttl_s=60)
    assert (await other.admit(asked, "more", ttl_s=60, now=NOW)).concurrent == 3


async def test_tokens_are_charged_with_the_record_and_once(one: State, other: State, later: Later):
    asked = key(tokens_per_minute=60)
    first = await one.admit(asked, "a", ttl_s=60, now=NOW)
    assert (first.outcome, first.tokens_used) == (RateLimitOutcome.ADMITTED, 0)
    used = record("r1", prompt_tokens=60, completion_tokens=200)
    assert await one.add_request(used)
    refused = await other.admit(asked, "b", ttl_s=60, now=NOW)
    assert refused.outcome is RateLimitOutcome.TOKENS
    assert 60 * UNITS <= refused.tokens_used <= 260 * UNITS
    assert 0 < retry_in_s(asked, refused, NOW) <= 200.001
    assert not await other.add_request(used)
    assert not await one.add_request(msgspec.structs.replace(used, prompt_tokens=10**6))
    again = await other.admit(asked, "b", ttl_s=60, now=NOW)
    assert again.tokens_used <= refused.tokens_used
    await later(200.001)
    assert await verdict(other, asked, "b") is RateLimitOutcome.ADMITTED


async def test_a_large_debt_is_kept_to_the_last_token(one: State, other: State):
    asked = key(tokens_per_minute=10**9)
    await one.admit(asked, "a", ttl_s=60, now=NOW)
    for n in range(3):
        await one.add_request(record(f"r{n}", prompt_tokens=10**10, completion_tokens=1))
    stands = await other.admit(asked, "b", ttl_s=60, now=NOW)
    drained_ms = (3 * (10**10 + 1) * UNITS - stands.tokens_used) / 10**9
    assert drained_ms == int(drained_ms) and 0 <= drained_ms < 20_000


async def test_a_clock_of_redis_that_was_ahead_locks_no_key_out(empty_redis_url: str):
    asked = key(requests_per_minute=60_000)
    connections = ConnectionPool(empty_redis_url)
    async with RedisState.connect(empty_redis_url) as state:
        await state.admit(asked, "early", ttl_s=60, now=NOW)
        at = int(await connections.call("HGET", keys.bucket("k0"), "at"))
        full = ("at", at + 3_600_000, "requests", 60_000 * UNITS)
        await connections.call("HSET", keys.bucket("k0"), *full)
        assert await verdict(state, asked, "late") is RateLimitOutcome.REQUESTS  # what was used is used
        await _grown_older(connections, 0.001)
        assert await verdict(state, asked, "late") is RateLimitOutcome.ADMITTED
    await connections.aclose()


async def test_a_clock_in_memory_that_was_ahead_locks_no_key_out():
    clock = FakeClock()
    state = MemoryState(clock=clock)
    slow = key(requests_per_minute=1)
    await state.admit(slow, "early", ttl_s=60, now=NOW)
    clock.advance(-3600)
    assert await verdict(state, slow, "late") is RateLimitOutcome.REQUESTS
    clock.advance(60)
    assert await verdict(state, slow, "late") is RateLimitOutcome.ADMITTED


async def test_tokens_used_without_a_limit_are_no_debt(one: State, other: State):
    limited = key(tokens_per_minute=10, requests_per_minute=100)
    await one.put_key(limited)
    await one.admit(limited, "a", ttl_s=60, now=NOW)
    lifted = replace(limited, tokens_per_minute=None)
    await one.replace_key(limited, lifted)
    await one.add_request(record("r1", prompt_tokens=10**6))
    await other.admit(lifted, "b", ttl_s=60, now=NOW)
    await one.add_request(record("r2", prompt_tokens=10**6))
    stands = await other.admit(limited, "c", ttl_s=60, now=NOW)
    assert (stands.outcome, stands.tokens_used) == (RateLimitOutcome.ADMITTED, 0)


async def test_spending_is_by_period_and_counted_before_there_is_a_limit(one: State, other: State):
    day = 86_400
    for n, (ended_at, cost) in enumerate([(NOW, 5), (NOW - day, 7), (NOW - 40 * day, 11)]):
        added = record(f"r{n}", ended_at=ended_at, cost_nanos=cost)
        assert await one.add_request(added)
        assert not await other.add_request(added)
    await one.add_request(record("other", key_id="k1", ended_at=NOW, cost_nanos=1000))
    spent = [await other.spent_nanos("k0", period, NOW) for period in SpendPeriod]
    assert spent == [5, 12, 23]
    assert await one.spent_nanos("nobody", SpendPeriod.TOTAL, NOW) == 0
    for period, at, limit, admitted in [
        (SpendPeriod.DAY, NOW, 6, True),
        (SpendPeriod.DAY, NOW, 5, False),
        (SpendPeriod.DAY, NOW + day, 1, True),
        (SpendPeriod.MONTH, NOW, 12, False),
        (SpendPeriod.MONTH, NOW + 15 * day, 1, True),
        (SpendPeriod.TOTAL, NOW + 400 * day, 23, False),
        (SpendPeriod.TOTAL, NOW, 24, True),
        (SpendPeriod.DAY, NOW, 0, False),
    ]:
        asked = key(spend_limit_nanos=limit, spend_period=period)
        expected = RateLimitOutcome.ADMITTED if admitted else RateLimitOutcome.SPENT
        assert await verdict(one, asked, f"{period}{limit}{at}", now=at) is expected


async def test_reservations_count_towards_the_spend_limit_while_their_leases_are_held(
    one: State, other: State, later: Later
):
    asked = key(spend_limit_nanos=100, spend_period=SpendPeriod.TOTAL)
    for place in "abcd":
        assert await verdict(one, asked, place, ttl_s=60.0) is RateLimitOutcome.ADMITTED
    assert await one.reserve(asked, "a", 60, now=NOW)
    assert await other.reserve(asked, "b", 60, now=NOW)  # something is left: the last may pass the limit
    assert not await other.reserve(asked, "c", 1, now=NOW)
    assert await one.reserve(asked, "b", 30, now=NOW)  # a repetition replaces it
    assert await other.reserve(asked, "c", 10**6, now=NOW)
    await one.release_concurrency_leases(places_of("c"))
    await one.add_request(record("r1", cost_nanos=10))
    assert not await other.reserve(asked, "d", 1, now=NOW)  # 60 + 30 + 10
    await later(61.0)  # their gateway died
    assert await verdict(one, asked, "e") is RateLimitOutcome.ADMITTED
    assert await other.reserve(asked, "e", 89, now=NOW)
    assert await verdict(one, asked, "f") is RateLimitOutcome.ADMITTED
    assert await other.reserve(asked, "f", 1, now=NOW)
    assert await one.reserve(key(), "g", 10**9, now=NOW)


async def test_a_key_is_replaced_by_who_read_it_last(one: State, other: State):
    first = key()
    with pytest.raises(NotFound):
        await one.replace_key(first, key(max_concurrent=1))
    await one.put_key(first)
    revoked, limited = replace(first, revoked_at=5.0), replace(first, max_concurrent=1)
    await one.replace_key(first, revoked)
    with pytest.raises(Conflict):
        await other.replace_key(first, limited)
    await one.replace_key(first, revoked)  # as after a lost answer
    assert await other.key("k0") == revoked
    outcomes = await asyncio.gather(
        *(
            (one, other)[n % 2].replace_key(revoked, replace(revoked, max_concurrent=n + 1))
            for n in range(10)
        ),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes].count(Conflict) == 9


async def test_an_admission_whose_answer_was_lost_counts_once(tmp_path: Path) -> None:
    asked = key(requests_per_minute=2, max_concurrent=2)
    async with (
        RedisServer(tmp_path) as server,
        RedisState.connect(server.url, timeout_s=20) as state,
        RedisState.connect(server.url, timeout_s=1) as impatient,
    ):
        await connected(impatient)
        assert await verdict(state, asked, "a") is RateLimitOutcome.ADMITTED
        server.pause()
        with pytest.raises(StateUnavailable):
            await impatient.admit(asked, "b", ttl_s=60, now=NOW)
        server.resume()
        again = await state.admit(asked, "b", ttl_s=60, now=NOW)
        assert (again.outcome, again.concurrent) == (RateLimitOutcome.ADMITTED, 2)
        assert again.requests_used <= 2 * UNITS
        await server.kill()
        await server.start()
        # The append-only file has it all.
        refused = await state.admit(asked, "c", ttl_s=60, now=NOW)
        assert (refused.outcome, refused.concurrent) == (RateLimitOutcome.BUSY, 2)
        assert refused.requests_used > UNITS


LIMITS = st.integers(1, 10**9)


@given(rate=st.sampled_from(["requests", "tokens"]), limit=LIMITS, used=st.integers(0, 10**18))
def test_the_retry_is_when_it_would_be_admitted_and_no_sooner(rate: str, limit: int, used: int) -> None:
    asked = key(**{f"{rate}_per_minute": limit})

    def judged(waited_ms: int) -> RateLimitOutcome:
        left = drained(used, limit, waited_ms)
        requests, tokens = (left, 0) if rate == "requests" else (0, left)
        return judge(asked, requests_used=requests, tokens_used=tokens, concurrent=0, spent_nanos=0)

    if judged(0) is RateLimitOutcome.ADMITTED:
        return
    stands = RateLimitDecision(
        outcome=judged(0), requests_used=used, tokens_used=used, concurrent=0, spent_nanos=0
    )
    wait_ms = round(retry_in_s(asked, stands, NOW) * 1000)
    if wait_ms < 2**50:  # as far as a float of seconds resolves milliseconds
        assert judged(wait_ms) is RateLimitOutcome.ADMITTED
        assert judged(wait_ms - 1) is not RateLimitOutcome.ADMITTED


@given(limit=LIMITS, used=st.integers(0, 10**18))
def test_what_remains(limit: int, used: int) -> None:
    left = remaining(limit, used)
    assert 0 <= left <= limit
    assert not left or used + left * UNITS <= limit * UNITS
    full_ms = full_in_ms(limit, used)
    assert drained(used, limit, full_ms) == 0
    assert not full_ms or drained(used, limit, full_ms - 1) > 0


def test_periods_are_of_the_calendar() -> None:
    new_year = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert spend_field(SpendPeriod.DAY, new_year) == "2027-01-01"
    assert spend_field(SpendPeriod.DAY, new_year - 0.001) == "2026-12-31"
    assert spend_field(SpendPeriod.MONTH, new_year - 0.001) == "2026-12"
    assert spend_field(SpendPeriod.TOTAL, NOW) == "total"
    assert period_end(SpendPeriod.DAY, new_year - 1) == new_year
    assert period_end(SpendPeriod.MONTH, new_year - 25 * 86_400) == new_year
    assert period_end(SpendPeriod.TOTAL, NOW) == float("inf")


def test_spend_limits_are_written_as_people_do() -> None:
    assert parse_spend_limit("12.50/month") == SpendLimit(12_500_000_000, SpendPeriod.MONTH)
    assert parse_spend_limit(" 0/day") == SpendLimit(0, SpendPeriod.DAY)
    assert str(parse_spend_limit("100/total")) == "100/total"
    assert (money(1), money(10**10), money(0)) == ("0.000000001", "10", "0")
    for wrong in ("", "5", "5/week", "-1/day", "x/day", "nan/day", "inf/day", "0.0000000001/day", "1e20/day"):
        with pytest.raises(InvalidRecord):
            parse_spend_limit(wrong)
