"""Reports over the ledger: any grouping adds up to the rows; tables, times, and what one may read."""

import asyncio
import csv
import io
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.accounting import usage_groups, usage_reader
from registry.accounting.ledger_pages import each_request, interval_pages, lost_calls
from registry.accounting.prices import DEFAULT_RATES
from registry.accounting.tables import to_csv, to_parquet
from registry.accounting.usage_groups import GroupedSums, PeriodSums, percentile
from registry.accounting.usage_report import COLUMNS, parse_by
from registry.errors import InvalidRecord
from registry.memory.state import MemoryState
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from registry.units.moments import parse_moment
from tests.fixtures.registry_records import request
from tests.fixtures.usage import NOW, done, interval, lost, part

records = st.lists(
    st.builds(
        lambda status, tenant, node, kind, at, tokens: request(
            status=status,
            tenant=tenant,
            key_id=f"k-{tenant}",
            node=node,
            start_kind=kind,
            ended_at=NOW + at,
            prompt_tokens=tokens,
            billed_gpu_ms=3 * tokens,
        ),
        st.sampled_from(list(RequestStatus)),
        st.sampled_from(["acme", "ümlaut", ""]),
        st.sampled_from(["n0", "n1"]),
        st.sampled_from(["hot", "cold"]),
        st.floats(0, 200_000),
        st.integers(0, 10**6),
    ),
    max_size=30,
).map(
    lambda found: [
        msgspec.structs.replace(record, request_id=f"r{index}") for index, record in enumerate(found)
    ]
)
groupings = st.lists(st.sampled_from(usage_groups.PROPERTIES), unique=True, min_size=1)


@given(found=records, by=groupings)
def test_the_sums_of_any_grouping_are_the_sums_of_the_rows(found, by):
    sums = GroupedSums(by)
    for record in found:
        sums.add(record)
    rows = sums.rows()
    assert sum(row["requests"] for row in rows) == len(found)
    for column in COLUMNS[1:]:
        assert sum(row[column] for row in rows) == sum(getattr(record, column) for record in found)
    groups = [tuple(row[name] for name in by) for row in rows]
    assert groups == sorted(set(groups))


def test_groups_are_named_in_utc_and_wrong_ones_refused():
    sums = GroupedSums(("hour", "day", "status", "version"))
    sums.add(request(ended_at=1_763_719_199.99))
    (row,) = sums.rows()
    assert tuple(row.values())[:4] == ("2025-11-21T09:00Z", "2025-11-21", "ok", 1)
    assert parse_by(" tenant , day", usage_groups.PROPERTIES) == ("tenant", "day")
    for wrong in ("colour", "tenant,tenant"):
        with pytest.raises(InvalidRecord):
            parse_by(wrong, usage_groups.PROPERTIES)


def test_a_report_with_too_many_rows_is_refused():
    sums = GroupedSums(("key",))
    for index in range(usage_groups.MAX_ROWS):
        sums.add(request(key_id=f"{index}"))
    sums.add(request(key_id="0"))
    with pytest.raises(InvalidRecord, match="narrow"):
        sums.add(request(key_id="one more"))


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_nearest_rank(values, share):
    ordered = sorted(values)
    assert percentile(Counter(values), share) == ordered[-(-len(values) * share // 100) - 1]


def test_a_summary_has_statuses_times_and_cost_by_currency():
    euro = replace(DEFAULT_RATES[0], id="cpu-002", currency="EUR")
    summary = PeriodSums([euro])
    for index in range(20):
        status = RequestStatus.FAILED if index == 0 else RequestStatus.OK
        summary.add(request(f"r{index}", status=status, queue_ms=index, exec_ms=100))
    summary.add(request("euro", rate_id="cpu-002", cost_nanos=7))
    in_euro, row = summary.rows()
    assert (in_euro.currency, in_euro.cost_nanos, in_euro.requests) == ("EUR", 7, 1)
    assert (row.requests, row.ok, row.failed, row.cancelled) == (20, 19, 1, 0)
    assert (row.queue_p50_ms, row.queue_p95_ms, row.exec_p95_ms) == (9, 18, 100)
    assert (row.currency, row.cost_nanos) == ("USD", 20 * 45_200)


def test_tables_as_csv_and_parquet_hold_the_same():
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"from": 1.5, "to": 2.0, "function": 'quo"te,', "idle_ms": 3, "node": None},
        {"from": 2.0, "to": 3.0, "function": "ü\n", "idle_ms": 2**60, "node": "n0"},
    ]
    columns = ["from", "to", "function", "node", "idle_ms"]
    first, second = csv.DictReader(io.StringIO(to_csv(rows, columns)))
    assert (first["function"], first["node"], second["function"]) == ('quo"te,', "", "ü\n")
    table = parquet.read_table(io.BytesIO(to_parquet(rows, columns)))
    assert table.column_names == columns
    assert [value.timestamp() for value in table["from"].to_pylist()] == [1.5, 2.0]
    assert table["idle_ms"].to_pylist() == [3, 2**60]
    assert table["node"].to_pylist() == [None, "n0"]
    assert str(parquet.read_table(io.BytesIO(to_parquet([], columns)))["idle_ms"].type) == "int64"


def test_times_are_durations_ago_or_utc():
    assert parse_moment("90s", 1000.0) == 910.0
    assert parse_moment("1h30m", 10_000.0) == 4600.0
    assert parse_moment("1763719200", 0.0) == 1_763_719_200.0
    for text in ("2025-11-21T10:00:00Z", "2025-11-21T10:00", "2025-11-21T11:00:00+01:00"):
        assert parse_moment(text, 0.0) == 1_763_719_200.0
    assert parse_moment("2025-11-21", 0.0) == 1_763_683_200.0
    for wrong in ("yesterday", "-5", "1e13", "nan", "5x", "", "10y"):
        with pytest.raises(InvalidRecord):
            parse_moment(wrong, 0.0)


async def test_reports_give_way_to_others_between_pages_of_what_they_read():
    state = MemoryState()
    for number in range(2000):
        await state.add_interval(interval(f"i{number % 7}", number, number + 1))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    before = turns
    await usage_reader.gpu_time(state, UsageFilter(), ("node",))
    between = turns
    await usage_reader.reconcile_ledger(state, dict)
    assert between - before >= 10 and turns - between >= 10
    task.cancel()


async def test_what_a_report_must_read_is_bounded_over_all_tenants():
    state = MemoryState()
    for number in range(4):
        await state.add_request(done(f"r{number}"))
        await state.add_interval(interval("i0", number, number + 1, calls=(part(f"r{number}/0", 0, 5),)))
        await state.add_lost_call(lost(f"r{number}/0", 5))
    nobody = UsageFilter(tenant="nobody")
    assert [one async for one in each_request(state, nobody, max_records=4)] == []
    with pytest.raises(InvalidRecord, match="narrow"):
        [one async for one in each_request(state, nobody, max_records=3)]
    assert [len(page) async for page in interval_pages(state, until=NOW + 2, max_records=2)] == [2]
    with pytest.raises(InvalidRecord, match="narrow"):
        [page async for page in interval_pages(state, max_records=3)]
    with pytest.raises(InvalidRecord, match="narrow"):
        [page async for page in interval_pages(state, max_calls=3)]
    assert len(await lost_calls(state, max_records=4)) == 4
    with pytest.raises(InvalidRecord, match="narrow"):
        await lost_calls(state, max_records=3)
