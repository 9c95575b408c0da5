"""The ledger: idempotent, in order, and its sums are the sums of its rows."""

import asyncio
import gc
import math
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.accounting.prices import DEFAULT_RATES, ensure_default_rates
from registry.accounting.usage_report import (
    DAY_S,
    UsageTotals,
    amounts_of,
    day_of,
    matches,
    overlaps,
    split_days,
)
from registry.errors import Conflict, InvalidRecord, NotFound
from registry.records.usage import CallPart, InstanceInterval, RequestRecord, cost_nanos
from registry.redis.state import RedisState
from registry.state import Ledger, State, UsageFilter
from tests.fixtures.registry_records import request
from tests.fixtures.state import empty_state
from tests.fixtures.usage import lost

DAY = 19_675
MIDNIGHT = float(DAY * DAY_S)


@pytest.fixture
def ledger(state: State) -> Ledger:
    return state


async def test_of_fifty_equal_records_one_counts(ledger: Ledger):
    added = await asyncio.gather(*(ledger.add_request(request()) for _ in range(50)))
    assert added.count(True) == 1
    (row,) = await ledger.report(UsageFilter())
    assert (row.requests, row.prompt_tokens, row.cost_nanos) == (1, 7, 45_200)
    assert await ledger.request("r0") == request()
    with pytest.raises(NotFound):
        await ledger.request("r1")


async def test_a_second_record_of_an_id_does_not_replace_the_first(ledger: Ledger):
    assert await ledger.add_request(request())
    assert not await ledger.add_request(request(cost_nanos=1))
    assert (await ledger.request("r0")).cost_nanos == 45_200


async def test_large_costs_written_together_are_added_exactly(empty_redis_url):
    costs = [2**52 + 1, 2**52 + 1, 3, 2**60 + 1, 5]  # a double holds 53 bits
    async with RedisState.connect(empty_redis_url) as ledger:
        records = [request(f"r{n}", cost_nanos=cost) for n, cost in enumerate(costs)]
        assert all(await asyncio.gather(*map(ledger.add_request, records)))
        (row,) = await ledger.report(UsageFilter())
        assert row.cost_nanos == sum(costs)


async def test_a_cost_beyond_any_bound_leaves_no_record_without_sums(empty_redis_url):
    async with RedisState.connect(empty_redis_url) as ledger:
        added = await asyncio.gather(
            *(ledger.add_request(request(f"r{n}", cost_nanos=cost)) for n, cost in enumerate([2**63, 5]))
        )
        assert added == [True, True]
        (row,) = await ledger.report(UsageFilter())
        assert (row.requests, row.billed_gpu_ms, row.cost_nanos) == (2, 1800, 2**63 - 1)
        assert len((await ledger.requests(UsageFilter()))[0]) == 2


def test_no_request_costs_more_than_sums_can_hold():
    rate = replace(DEFAULT_RATES[0], gpu_second_nanos=10**13, request_nanos=10**13)
    assert cost_nanos(rate, 1000, 0, 0) == 2 * 10**13
    assert cost_nanos(rate, 10**12, 0, 0) == 2**53


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_pages_hold_every_record_once_in_order(ledger: Ledger, limit):
    # Many end at the same moment, and between them others come in late.
    ends = [MIDNIGHT + index // 8 for index in range(30)]
    for index in reversed(range(30)):
        tenant = "acme" if index % 3 else "other"
        await ledger.add_request(request(f"r{index:02}", ended_at=ends[index], tenant=tenant))
    where = UsageFilter(since=MIDNIGHT + 1, until=MIDNIGHT + 3, tenant="acme")
    found: list[RequestRecord] = []
    cursor = ""
    while True:
        page, cursor = await ledger.requests(where, limit=limit, cursor=cursor)
        assert len(page) <= limit
        found += page
        if not cursor:
            break
    expected = [f"r{index:02}" for index in range(8, 24) if index % 3]
    assert [record.request_id for record in found] == expected
    with pytest.raises(InvalidRecord):
        await ledger.requests(where, cursor="never seen")


# Ends at the edges of days and just beside them, where a sum by days goes wrong first.
moments = st.one_of(
    st.builds(
        lambda day, offset: (DAY + day) * DAY_S + offset,
        st.integers(0, 3),
        st.sampled_from([0.0, -0.001, 0.001, 1.5, 43_200.0]),
    ),
    st.floats(MIDNIGHT, MIDNIGHT + 4 * DAY_S),
)
bounds = st.one_of(st.none(), moments, st.sampled_from([math.inf, -math.inf]))
records = st.builds(
    lambda index, ended_at, function, tenant, tokens, cost: request(
        f"r{index}",
        ended_at=ended_at,
        function=function,
        tenant=tenant,
        prompt_tokens=tokens,
        completion_tokens=2 * tokens,
        billed_gpu_ms=3 * tokens,
        cost_nanos=cost,
    ),
    st.integers(0, 20),
    moments,
    st.sampled_from(["tiny", "big"]),
    st.sampled_from(["acme", 'quo"te', "ümlaut:x"]),
    st.integers(0, 10**6),
    st.integers(0, 10**12),
)
filters = st.builds(
    UsageFilter,
    since=bounds,
    until=bounds,
    function=st.sampled_from([None, "tiny"]),
    tenant=st.sampled_from([None, 'quo"te', "nobody"]),
)


@pytest.mark.parametrize("kind", ["memory", "redis"])
@settings(max_examples=60)
@given(rows=st.lists(records, max_size=25), wheres=st.lists(filters, min_size=1, max_size=6))
async def test_a_report_is_the_sum_of_the_rows(kind, redis_url, rows, wheres):
    async with empty_state(kind, redis_url) as ledger:
        kept: dict[str, RequestRecord] = {}
        for record in rows:
            assert await ledger.add_request(record) == (record.request_id not in kept)
            kept.setdefault(record.request_id, record)
        for where in wheres:
            chosen = [record for record in kept.values() if matches(where, record)]
            totals = UsageTotals()
            for record in chosen:
                totals.add(record.function, record.tenant, amounts_of(record))
            assert await ledger.report(where) == totals.rows()
            listed, cursor = await ledger.requests(where)
            expected = sorted(chosen, key=lambda record: (record.ended_at, record.request_id))
            assert (listed, cursor) == (expected, "")


async def test_a_report_keeps_no_record_of_the_days_it_cuts(empty_redis_url):
    async def peak_bytes(state: RedisState) -> int:
        gc.collect()
        tracemalloc.start()
        (row,) = await state.report(UsageFilter(since=MIDNIGHT + 1))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert row.requests == 4000
        return peak

    async with RedisState.connect(empty_redis_url) as state:
        records = (request(f"r{at}", ended_at=MIDNIGHT + 1 + at) for at in range(4000))
        await asyncio.gather(*map(state.add_request, records))
        await peak_bytes(state)  # what it needs once for all
        assert await peak_bytes(state) < 4000 * 200


@given(since=bounds, until=bounds, at=moments)
def test_each_moment_of_a_span_is_in_one_part_of_its_split(since, until, at):
    finite_since = None if since == -math.inf else since
    finite_until = None if until == math.inf else until
    split = split_days(finite_since, finite_until)
    inside = (since is None or since <= at) and (until is None or at < until)
    parts = int(split.covers(day_of(at))) + sum(
        (low is None or low <= at) and (high is None or at < high) for low, high in split.edges
    )
    assert parts == int(inside)


async def test_intervals_are_added_once_and_found_by_overlap(ledger: Ledger):
    loading, ready, empty = (
        numbered(0, 0, 5, state="loading"),
        numbered(0, 5, 20),
        numbered(0, 20, 20, state="draining"),
    )
    added = await asyncio.gather(*(ledger.add_interval(loading) for _ in range(20)))
    assert added.count(True) == 1
    assert await ledger.add_interval(ready)
    assert await ledger.add_interval(empty)
    assert not await ledger.add_interval(numbered(0, 5, 99))
    assert await ledger.intervals() == [loading, ready, empty]
    assert await ledger.intervals(since=5) == [ready, empty]
    assert await ledger.intervals(until=5) == [loading]
    assert await ledger.intervals(since=4, until=6) == [loading, ready]
    assert await ledger.intervals(since=20) == [empty]
    assert await ledger.intervals(since=21) == []
    assert loading in [one async for page in ledger.interval_pages(until=5) for one in page]
    await ledger.add_interval(numbered(0, 4, 3e5))  # no interval is as long as that
    pages = [page async for page in ledger.interval_pages(since=1e6, until=2e6)]
    assert not any(pages)
    assert [lost async for page in ledger.lost_call_pages() for lost in page] == []
    assert await ledger.requests_by_id(["nobody's"]) == [] == await ledger.requests_by_id([])


async def test_requests_are_found_by_the_id_of_their_client(ledger: Ledger) -> None:
    mine = [request(f"r{n}", ended_at=9.0 + n, client_request_id="mine") for n in (3, 0, 2, 1)]
    like = [request(name, client_request_id=name) for name in ("min", "mine.", "mine-1", "mine!")]
    for record in (*mine, *like, request("mine")):
        assert await ledger.add_request(record)
    assert not await ledger.add_request(mine[0])
    found = await ledger.requests_by_client_id("mine")
    assert [record.request_id for record in found] == ["r0", "r1", "r2", "r3"]
    assert [one.request_id for one in await ledger.requests_by_client_id("mine", limit=2)] == ["r2", "r3"]
    assert await ledger.requests_by_client_id("other") == []


spans = st.tuples(st.integers(0, 500), st.one_of(st.integers(0, 60), st.sampled_from([0, 300])))


@pytest.mark.parametrize("kind", ["memory", "redis"])
@settings(max_examples=25)
@given(
    lives=st.lists(spans, max_size=40),
    since=st.one_of(st.none(), st.integers(0, 600)),
    until=st.one_of(st.none(), st.integers(0, 600)),
)
async def test_pages_hold_each_interval_that_overlaps_the_times(kind, redis_url, lives, since, until):
    async with empty_state(kind, redis_url) as ledger:
        written = [numbered(index, start, start + length) for index, (start, length) in enumerate(lives)]
        for interval in written:
            await ledger.add_interval(interval)
        found = [one async for page in ledger.interval_pages(since=since, until=until) for one in page]
        backwards = since is not None and until is not None and until <= since
        wanted = [] if backwards else [one for one in written if overlaps(one, since, until)]
        found = sorted(found, key=lambda one: int(one.instance_id[1:]))
        assert [one for one in found if overlaps(one, since, until)] == wanted


async def test_an_hour_of_a_long_ledger_is_read_by_itself(ledger: Ledger):
    for minute in range(3000):
        await ledger.add_interval(numbered(minute % 2, 60.0 * minute, 60.0 * minute + 120))
    pages = [page async for page in ledger.interval_pages(since=36_000, until=39_600)]
    assert 61 <= sum(map(len, pages)) <= 200


def numbered(index: int, start: float, end: float, **changes: object) -> InstanceInterval:
    record = InstanceInterval(
        instance_id=f"i{index}",
        function="tiny",
        version=1,
        node="n0",
        state="ready",
        from_at=float(start),
        to_at=float(end),
        gpu_count=1,
    )
    return replace(record, **changes)


async def test_a_page_of_intervals_names_few_calls(ledger: Ledger):
    calls = tuple(
        CallPart(call_id=f"req-{number:024}/0-{number:08}", from_us=0, to_us=10_000) for number in range(500)
    )
    written = [numbered(number, 0.0, 60.0 + number // 3, calls=calls) for number in range(40)]
    for interval in written:
        await ledger.add_interval(interval)
    pages = [page async for page in ledger.interval_pages()]
    assert max(map(len, pages)) <= 12 and min(map(len, pages)) >= 1
    found = [one for page in pages for one in page]
    assert sorted(found, key=lambda one: int(one.instance_id[1:])) == written
    assert [one.to_at for one in found] == sorted(one.to_at for one in written)


async def test_lost_calls_are_added_once_and_found_by_their_end(ledger: Ledger):
    first, second, third = (
        lost(call, 1_234_567, ended_at=at) for call, at in (("b", 5.0), ("a", 7), ("c", 7.0))
    )
    added = await asyncio.gather(*(ledger.add_lost_call(third) for _ in range(20)))
    assert added.count(True) == 1
    assert await ledger.add_lost_call(first)
    assert await ledger.add_lost_call(second)
    assert not await ledger.add_lost_call(lost("b", 1_234_567, ended_at=99))
    assert await ledger.lost_calls() == [first, second, third]
    assert await ledger.lost_calls(since=5, until=7) == [first]
    assert await ledger.lost_calls(since=7) == [second, third]
    assert await ledger.lost_calls(until=5) == []
    assert await ledger.report(UsageFilter()) == []


async def test_a_rate_never_changes(ledger: Ledger):
    assert await ensure_default_rates(ledger) == sorted(DEFAULT_RATES, key=lambda rate: rate.id)
    await ensure_default_rates(ledger)
    rate = replace(DEFAULT_RATES[0], id="cpu-002")
    await ledger.put_rate(rate)
    await ledger.put_rate(rate)
    with pytest.raises(Conflict):
        await ledger.put_rate(replace(rate, gpu_second_nanos=9))
    assert rate in await ledger.rates()
