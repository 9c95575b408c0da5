"""Reports over the ledger: any grouping adds up to the rows, GPU time adds up to what was allocated."""

import asyncio
import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry import gpu_report, usage_groups, usage_reader
from registry.conservation import Verdict, conservation, presence_us
from registry.errors import InvalidRecord
from registry.gpu_report import GpuRow, GpuTime, Span, lost_by_call
from registry.gpu_shares import shares
from registry.ledger_pages import each_request, interval_pages, lost_calls
from registry.memory_state import MemoryState
from registry.moments import parse_moment
from registry.state import UsageFilter
from registry.tables import to_csv, to_parquet
from registry.usage import CallPart, GpuSlice, InstanceInterval, LostCall, Rate, RequestRecord, RequestStatus
from registry.usage_groups import GroupedSums, Summary, percentile
from registry.usage_report import COLUMNS
from tests.registry_records import request

NOW = 1_700_000_000.0


def interval(name: str = "i0", start: float = 0.0, end: float = 60.0, **changes: object) -> InstanceInterval:
    """Idle for all of its time unless told otherwise; with `calls` it was busy for these."""
    if "calls" in changes:
        changes = {"busy_us": sum(one.used_us for one in changes["calls"]), "epoch": 1} | changes  # type: ignore[attr-defined]
    times = {key: int(changes.pop(key, 0)) for key in ("busy_us", "loading_us")}  # type: ignore[call-overload]
    idle_us = round((end - start) * 1e6) - sum(times.values())
    record = InstanceInterval(
        instance_id=name,
        function="tiny",
        version=1,
        node="n0",
        state="ready",
        from_at=NOW + start,
        to_at=NOW + end,
        gpu_count=1,
        idle_us=idle_us,
        **times,
    )
    return replace(record, **changes)


def part(call: str, start_us: int, end_us: int, *, over: bool = False) -> CallPart:
    return CallPart(call_id=call, from_us=start_us, to_us=end_us, over=over)


def us(at: float) -> int:
    return round((NOW + at) * 1e6)


def used(gpu_us: int, call: str = "r0/0", name: str = "i0", node: str = "n0") -> GpuSlice:
    return GpuSlice(call_id=call, instance_id=name, node=node, gpu_us=gpu_us)


def done(
    name: str, *slices: GpuSlice, start: float = 0.0, end: float = 10.0, **changes: object
) -> RequestRecord:
    return request(
        name,
        gpu=slices,
        billed_gpu_ms=-(-sum(part.gpu_us for part in slices) // 1000),
        started_at=NOW + start,
        ended_at=NOW + end,
        **changes,
    )


def lost(call: str, used_us: int, name: str = "i0", at: float = 10.0, **changes: object) -> LostCall:
    call_record = LostCall(
        id=f"{call}@{name}",
        call_id=call,
        instance_id=name,
        node="n0",
        function="tiny",
        version=1,
        used_us=used_us,
        ended_at=NOW + at,
    )
    return replace(call_record, **changes)


# The machine may be busy with other tests.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Grouping.

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
).map(lambda found: [replace(record, request_id=f"r{index}") for index, record in enumerate(found)])
groupings = st.lists(st.sampled_from(usage_groups.PROPERTIES), unique=True, min_size=1)


@unhurried
@given(found=records, by=groupings)
def test_the_sums_of_any_grouping_are_the_sums_of_the_rows(found, by):
    sums = GroupedSums(by)
    for record in found:
        sums.add(record)
    rows = sums.rows()
    assert sum(row.requests for row in rows) == len(found)
    for column in COLUMNS[1:]:
        assert sum(getattr(row, column) for row in rows) == sum(getattr(record, column) for record in found)
    assert [row.group for row in rows] == sorted({row.group for row in rows})


def test_groups_are_named_in_utc_and_wrong_ones_refused():
    sums = GroupedSums(("hour", "day", "status", "version"))
    sums.add(request(ended_at=1_763_719_199.99))
    assert sums.rows()[0].group == ("2025-11-21T09:00Z", "2025-11-21", "ok", 1)
    assert usage_groups.parse_by(" tenant , day") == ("tenant", "day")
    for wrong in ("", "colour", "tenant,tenant"):
        with pytest.raises(InvalidRecord):
            usage_groups.parse_by(wrong)


def test_a_report_with_too_many_rows_is_refused():
    sums = GroupedSums(("key",))
    for index in range(usage_groups.MAX_ROWS):
        sums.add(request(key_id=f"{index}"))
    sums.add(request(key_id="0"))
    with pytest.raises(InvalidRecord, match="narrow"):
        sums.add(request(key_id="one more"))


@unhurried
@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_nearest_rank(values, share):
    ordered = sorted(values)
    assert percentile(Counter(values), share) == ordered[-(-len(values) * share // 100) - 1]


def test_a_summary_tells_statuses_times_and_cost_by_currency():
    euro = Rate(
        id="cpu-002",
        gpu_type="cpu",
        gpu_second_nanos=1,
        request_nanos=0,
        prompt_mtoken_nanos=0,
        completion_mtoken_nanos=0,
        currency="EUR",
    )
    summary = Summary([euro])
    for index in range(20):
        status = RequestStatus.FAILED if index == 0 else RequestStatus.OK
        summary.add(request(f"r{index}", status=status, queue_ms=index, exec_ms=100))
    summary.add(request("euro", rate_id="cpu-002", cost_nanos=7))
    in_euro, row = summary.rows()
    assert (in_euro.currency, in_euro.cost_nanos, in_euro.requests) == ("EUR", 7, 1)
    assert (row.requests, row.ok, row.failed, row.cancelled) == (20, 19, 1, 0)
    assert (row.queue_p50_ms, row.queue_p95_ms, row.exec_p95_ms) == (9, 18, 100)
    assert (row.currency, row.cost_nanos) == ("USD", 20 * 45_200)


# GPU time.


@given(
    start=st.integers(0, 10**9),
    length=st.integers(0, 10**9),
    amount=st.integers(0, 10**9),
    step=st.sampled_from([0, 10**6, 60 * 10**6, 7]),
    cut=st.integers(-(10**9), 2 * 10**9),
)
@unhurried
def test_parts_of_an_amount_add_up_to_it_wherever_it_is_cut(start, length, amount, step, cut):
    if step and length // step > 500:
        step = 10**7
    end = start + length
    whole = list(Span(step_us=step).parts(start, end, amount))
    assert sum(part for _, part in whole) == amount
    assert all(part >= 0 for _, part in whole)
    before = Span(until_us=cut, step_us=step).parts(start, end, amount)
    after = Span(since_us=cut, step_us=step).parts(start, end, amount)
    assert sum(part for _, part in before) + sum(part for _, part in after) == amount


def ledger() -> tuple[list[RequestRecord], list[InstanceInterval], list[LostCall]]:
    """Two instances that share a node for a minute, and one elsewhere; every microsecond accounted for."""
    ends = tuple(
        part(call, 0, end_us, over=True)
        for call, end_us in (("b/0", 4_000_103), ("c/0", 2_000_020), ("e/0", 1_000_000))
    )
    intervals = [
        interval("i0", 0, 30, busy_us=0, loading_us=2_000_000, idle_us=13_000_000, epoch=1),
        interval(
            "i1", 0, 30, calls=(part("a/0", 0, 5_000_000),), idle_us=10_000_000, function="big", final=True
        ),
        interval("i0", 30, 90, calls=ends, final=True),
        interval("i2", 0, 60, calls=(part("b/0+1", 0, 1_000_001),), node="n1", final=True),
    ]
    requests = [
        done("a", used(5_000_000, "a/0", "i1"), function="big", start=5, end=15),
        done("b", used(4_000_100, "b/0", "i0"), used(1_000_001, "b/0+1", "i2", "n1"), start=31, end=59),
        done("c", used(2_000_020, "c/0", "i0"), tenant="other", start=40, end=50),
        done("d", used(0, "d/0", "i0"), tenant="other", start=40, end=41),
    ]
    calls = [lost("e/0", 1_000_000, at=70), lost("b/0", 4_000_103, at=55)]
    return requests, intervals, calls


def test_gpu_time_adds_up_within_a_millisecond_a_record():
    requests, intervals, calls = ledger()
    assert conservation(requests, intervals, calls).verdict is Verdict.EXACT
    (row,) = gpu_rows(requests, intervals, calls)
    assert row.attributed_ms == sum(record.billed_gpu_ms for record in requests)
    assert row.allocated_ms == 150_000
    assert row.loading_ms == 2_000
    assert row.lost_ms == 1_000
    assert abs(row.attributed_ms + row.loading_ms + row.idle_ms - row.allocated_ms) <= len(requests)
    lost_us = 1_000_000 + 3  # is idle too
    assert row.idle_ms == round((sum(one.idle_us for one in intervals) + lost_us) / 1000)
    assert (row.from_at, row.to_at) == (NOW, NOW + 90)


def gpu_rows(
    requests: list[RequestRecord],
    intervals: list[InstanceInterval],
    lost: Sequence[LostCall] = (),
    *,
    by: Sequence[str] = (),
    span: Span | None = None,
    **only: str,
) -> list[GpuRow]:
    time = GpuTime(span=span or Span(), by=by, **only)
    records = {(one.call_id, one.instance_id): record for record in requests for one in record.gpu}
    for one in intervals:
        time.add(one, shares(one, records, lost_by_call(lost)))
    return time.rows()


NAMES = ("allocated_ms", "attributed_ms", "loading_ms", "idle_ms", "lost_ms")


@pytest.mark.parametrize("step_s", [0, 1, 7, 60, 3600])
@pytest.mark.parametrize("by", [("function",), ("tenant", "node"), ("node",), gpu_report.PROPERTIES])
def test_gpu_time_is_the_same_by_any_grouping_and_resolution(by, step_s):
    requests, intervals, calls = ledger()
    (total,) = gpu_rows(requests, intervals, calls)
    rows = gpu_rows(requests, intervals, calls, by=by, span=Span(step_us=step_s * 1_000_000))
    for name in NAMES:
        parts = sum(getattr(row, name) for row in rows)
        assert abs(parts - getattr(total, name)) <= 3, name
    assert all(row.loading_ms == row.idle_ms == row.lost_ms == 0 for row in rows if row.tenant)
    assert all(min(getattr(row, name) for name in NAMES) >= 0 for row in rows)


def test_rows_of_a_tenant_hold_its_own_time_only():
    requests, intervals, _ = ledger()
    (row,) = gpu_rows(requests, intervals, by=("tenant",), tenant="other")
    assert (row.tenant, row.allocated_ms, row.attributed_ms, row.idle_ms) == ("other", 2000, 2001, 0)


def test_calls_without_a_record_are_idle_and_what_is_lost_of_them_is_told():
    (row,) = gpu_rows([], [interval(end=20, busy_us=3_000_000)])
    assert (row.allocated_ms, row.attributed_ms, row.idle_ms, row.lost_ms) == (20_000, 0, 20_000, 0)
    one = interval(end=20, calls=(part("a/0", 0, 3_000_000),))
    (row,) = gpu_rows([done("a", used(1_000_000, "a/0"))], [one], [lost("a/0", 2_500_000)])
    assert (row.allocated_ms, row.attributed_ms, row.idle_ms, row.lost_ms) == (20_000, 1000, 19_000, 1500)


def test_a_request_that_went_on_elsewhere_uses_time_where_its_instances_were():
    requests = [
        done("a", used(9_000_000, "a/0"), used(50_000_000, "a/0+1", "i1", "n1"), start=0, end=110),
    ]
    intervals = [
        interval(end=10, calls=(part("a/0", 0, 9_000_000),)),
        interval("i1", 50, 110, node="n1", calls=(part("a/0+1", 0, 50_000_000),)),
    ]
    spans = [Span(step_us=60_000_000)]
    spans += [Span(since_us=us(at), until_us=us(at + 10)) for at in range(0, 110, 10)]
    rows = [gpu_rows(requests, intervals, span=span) for span in spans]
    assert sum(row.allocated_ms for row in rows[0]) == 70_000
    assert sum(row.allocated_ms for of in rows[1:] for row in of) == 70_000
    assert [sum(row.attributed_ms for row in of) for of in rows[1:6]] == [9000, 0, 0, 0, 0]


def test_the_record_of_a_request_id_that_was_used_before_is_found():
    async def main() -> None:
        state = MemoryState()
        await state.add_request(done("a", used(1000, "a/0-11111111")))
        await state.add_request(done("a~22222222", used(2000, "a/0-22222222"), tenant="other"))
        both = (part("a/0-11111111", 0, 1000), part("a/0-22222222", 0, 2000))
        await state.add_interval(interval(calls=both))
        rows = await usage_reader.gpu_time(state, UsageFilter(), ("tenant",))
        assert {row.tenant: row.attributed_ms for row in rows} == {"acme": 1, "other": 2, "": 0}
        assert (await usage_reader.balance(state, dict)).verdict is Verdict.EXACT

    asyncio.run(main())


def test_too_fine_a_resolution_is_refused():
    year = interval(end=366 * 86_400)
    with pytest.raises(InvalidRecord, match="coarser"):
        gpu_rows([], [year], span=Span(step_us=60_000_000))


def test_gpu_time_of_a_span_counts_what_reaches_into_it():
    async def main() -> None:
        state = MemoryState()
        requests, intervals, calls = ledger()
        for record in requests:
            await state.add_request(record)
        for one in intervals:
            await state.add_interval(one)
        for call in calls:
            await state.add_lost_call(call)
        where = UsageFilter(since=NOW, until=NOW + 10)
        (row,) = await usage_reader.gpu_time(state, where, ())
        assert (row.from_at, row.to_at) == (NOW, NOW + 10)
        assert (row.allocated_ms, row.attributed_ms, row.lost_ms) == (20_000, 1_833, 0)
        (row,) = await usage_reader.gpu_time(state, replace(where, function="big"), ())
        assert (row.allocated_ms, row.attributed_ms) == (5000, 1667)
        (row,) = await usage_reader.gpu_time(state, UsageFilter(), ())
        assert row.attributed_ms == sum(record.billed_gpu_ms for record in requests)
        found = await usage_reader.balance(state, dict)
        assert (found.verdict, found.requests) == (Verdict.EXACT, 4)
        rows = await usage_reader.grouped(state, UsageFilter(function="tiny"), ("status",), key="k0")
        assert [row.requests for row in rows] == [3]

    asyncio.run(main())


# Conservation.


def test_an_instance_that_does_not_add_up_is_named():
    requests, intervals, calls = ledger()
    found = conservation(requests, intervals, calls[1:])
    assert found.verdict is Verdict.WRONG
    (wrong,) = [one for one in found.instances if one.verdict is not Verdict.EXACT]
    assert (wrong.instance_id, wrong.missing_us) == ("i0", 1_000_020 - 20)
    assert "i0 on n0 is wrong" in str(found)
    # The node knows that the call is settled: so it is wrong even while the instance lives.
    assert conservation(requests, intervals, calls[1:], live={"i0": "n0"}).verdict is Verdict.WRONG
    twice = [*requests, done("f", used(1_000_000, "f/0"), end=20)]
    assert conservation(twice, intervals, calls).verdict is Verdict.WRONG
    assert conservation(twice, intervals, calls, live={"i0": "n0"}).verdict is Verdict.OPEN
    stolen = [*requests[1:], replace(requests[0], request_id="f")]
    assert conservation(stolen, intervals, calls, live={"i1": "n0"}).verdict is Verdict.WRONG


def test_nothing_is_wrong_without_a_proof():
    whole = interval(end=20, calls=(part("r0/0", 0, 500),))
    record = done("r0", used(500))
    more = done("r1", used(700, "r1/0"))
    for known, live in [([], {"i0": "n0"}), ([record, more], {"i0": "n0"}), ([record, more], {})]:
        assert conservation(known, [whole], [], live=live).verdict is Verdict.OPEN
    # Its node is dead, and all of its time is written.
    last = replace(whole, final=True)
    assert conservation([record, more], [last], []).verdict is Verdict.WRONG
    assert conservation([], [last], []).verdict is Verdict.OPEN  # the record of its last call is on its way
    # These can be told of any instance.
    after = interval(start=20, end=30)
    for wrong in (
        [replace(whole, busy_us=501, idle_us=whole.idle_us - 1)],
        [whole, replace(after, epoch=1, from_at=NOW + 25)],
        [replace(whole, calls=(part("r0/0", 0, 400, over=True), part("r2/0", 0, 100)))],
    ):
        assert conservation([record], wrong, [], live={"i0": "n0"}).verdict is Verdict.WRONG
    # Clocks of another process of the node, or of a gateway, prove nothing.
    earlier = interval("i1", 10, 20, epoch=2)
    late = replace(record, started_at=NOW - 1e6, ended_at=NOW - 1e6)
    assert conservation([late], [last, earlier], []).verdict is Verdict.EXACT


def test_a_call_that_was_recorded_after_all_is_not_lost():
    whole = interval(busy_us=500)
    for recorded, told in [((used(500),), 500), ((used(200),), 500), ((), 500)]:
        found = conservation([done("r0", *recorded)], [whole], [lost("r0/0", told)])
        assert found.verdict is Verdict.EXACT, str(found)
        assert found.instances[0].lost_us == 500 - sum(part.gpu_us for part in recorded)


def test_a_node_was_allocated_while_it_held_an_instance():
    shared = [interval("i0", 0, 10, idle_us=5_000_000), interval("i1", 0, 10, idle_us=5_000_000)]
    apart = interval("i2", 20, 30)
    assert presence_us([(us(0), us(10), 0), (us(0), us(10), 0), (us(20), us(30), 0)]) == 20_000_000
    assert conservation([], [*shared, apart], []).verdict is Verdict.EXACT
    found = conservation([], [*shared, replace(apart, idle_us=9_000_000)], [])
    assert found.verdict is Verdict.WRONG and "node n0 is wrong" in str(found)
    other = {"i9": "n0"}  # shares the node, and nothing of it is written down yet
    assert conservation([], [replace(apart, idle_us=9)], [], live=other).verdict is Verdict.OPEN
    assert conservation([], [*shared, replace(apart, idle_us=9_997_100)], []).verdict is Verdict.EXACT


# Tables and times.


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


def test_reports_give_way_to_others_between_pages_of_what_they_read():
    async def main() -> None:
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
        await usage_reader.balance(state, dict)
        assert between - before >= 10 and turns - between >= 10
        task.cancel()

    asyncio.run(main())


def test_what_a_report_must_read_is_bounded_whomever_it_is_of():
    async def main() -> None:
        state = MemoryState()
        for number in range(4):
            await state.add_request(done(f"r{number}"))
            await state.add_interval(interval("i0", number, number + 1, calls=(part(f"r{number}/0", 0, 5),)))
            await state.add_lost_call(lost(f"r{number}/0", 5))
        nobody = UsageFilter(tenant="nobody")
        assert [one async for one in each_request(state, nobody, most=4)] == []
        with pytest.raises(InvalidRecord, match="narrow"):
            [one async for one in each_request(state, nobody, most=3)]
        assert [len(page) async for page in interval_pages(state, until=NOW + 2, most=2)] == [2]
        with pytest.raises(InvalidRecord, match="narrow"):
            [page async for page in interval_pages(state, most=3)]
        with pytest.raises(InvalidRecord, match="narrow"):
            [page async for page in interval_pages(state, most_calls=3)]
        assert len(await lost_calls(state, most=4)) == 4
        with pytest.raises(InvalidRecord, match="narrow"):
            await lost_calls(state, most=3)

    asyncio.run(main())
