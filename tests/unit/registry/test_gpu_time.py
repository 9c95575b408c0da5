"""Reports of GPU time: by whatever grouping, it adds up to what was allocated."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.accounting import gpu_report, usage_reader
from registry.accounting.gpu_report import BucketedSpan, GpuRow, GpuTime, lost_by_call
from registry.accounting.gpu_shares import share_busy_time
from registry.accounting.reconciliation import BalanceVerdict, reconcile
from registry.errors import InvalidRecord
from registry.memory.state import MemoryState
from registry.records.usage import InstanceInterval, LostCall, RequestRecord
from registry.state import UsageFilter
from tests.fixtures.usage import NOW, done, interval, ledger, lost, part, us, used


@given(
    start=st.integers(0, 10**9),
    length=st.integers(0, 10**9),
    amount=st.integers(0, 10**9),
    step=st.sampled_from([0, 10**6, 60 * 10**6, 7]),
    cut=st.integers(-(10**9), 2 * 10**9),
)
def test_parts_of_an_amount_add_up_to_it_wherever_it_is_cut(start, length, amount, step, cut):
    if step and length // step > 500:
        step = 10**7
    end = start + length
    whole = list(BucketedSpan(step_us=step).parts(start, end, amount))
    assert sum(part for _, part in whole) == amount
    assert all(part >= 0 for _, part in whole)
    before = BucketedSpan(until_us=cut, step_us=step).parts(start, end, amount)
    after = BucketedSpan(since_us=cut, step_us=step).parts(start, end, amount)
    assert sum(part for _, part in before) + sum(part for _, part in after) == amount


def test_gpu_time_adds_up_within_a_millisecond_a_record():
    requests, intervals, calls = ledger()
    assert reconcile(requests, intervals, calls).verdict is BalanceVerdict.EXACT
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
    span: BucketedSpan | None = None,
    **only: str,
) -> list[GpuRow]:
    time = GpuTime(span=span or BucketedSpan(), by=by, **only)
    records = {(one.call_id, one.instance_id): record for record in requests for one in record.gpu}
    for one in intervals:
        time.add(one, share_busy_time(one, records, lost_by_call(lost)))
    return time.rows()


NAMES = ("allocated_ms", "used_ms", "attributed_ms", "loading_ms", "idle_ms", "lost_ms")


@pytest.mark.parametrize("step_s", [0, 1, 7, 60, 3600])
@pytest.mark.parametrize("by", [("function",), ("tenant", "node"), ("node",), gpu_report.PROPERTIES])
def test_gpu_time_is_the_same_by_any_grouping_and_resolution(by, step_s):
    requests, intervals, calls = ledger()
    (total,) = gpu_rows(requests, intervals, calls)
    rows = gpu_rows(requests, intervals, calls, by=by, span=BucketedSpan(step_us=step_s * 1_000_000))
    for name in NAMES:
        parts = sum(getattr(row, name) for row in rows)
        assert abs(parts - getattr(total, name)) <= 3, name
    assert all(row.loading_ms == row.idle_ms == row.lost_ms == 0 for row in rows if row.tenant)
    assert all(min(getattr(row, name) for name in NAMES) >= 0 for row in rows)


def test_rows_of_a_tenant_hold_its_own_time_only():
    requests, intervals, _ = ledger()
    (row,) = gpu_rows(requests, intervals, by=("tenant",), tenant="other")
    assert (row.tenant, row.allocated_ms, row.attributed_ms, row.idle_ms) == ("other", 2000, 2001, 0)


def test_what_is_billed_by_rounding_up_is_apart_from_what_was_used():
    brief = interval(end=1, calls=(part("a/0", 0, 300),))
    (row,) = gpu_rows([done("a", used(300, "a/0"))], [brief], by=("tenant",), tenant="acme")
    assert (row.allocated_ms, row.used_ms, row.attributed_ms) == (0, 0, 1)


def test_calls_without_a_record_are_idle_and_lost_time_is_reported():
    (row,) = gpu_rows([], [interval(end=20, busy_us=3_000_000)])
    assert (row.allocated_ms, row.attributed_ms, row.idle_ms, row.lost_ms) == (20_000, 0, 20_000, 0)
    one = interval(end=20, calls=(part("a/0", 0, 3_000_000),))
    (row,) = gpu_rows([done("a", used(1_000_000, "a/0"))], [one], [lost("a/0", 2_500_000)])
    assert (row.allocated_ms, row.attributed_ms, row.idle_ms, row.lost_ms) == (20_000, 1000, 19_000, 1500)


def test_a_request_that_went_on_elsewhere_uses_time_where_its_instances_were():
    requests = [done("a", used(9_000_000, "a/0"), used(50_000_000, "a/0+1", "i1", "n1"), start=0, end=110)]
    intervals = [
        interval(end=10, calls=(part("a/0", 0, 9_000_000),)),
        interval("i1", 50, 110, node="n1", calls=(part("a/0+1", 0, 50_000_000),)),
    ]
    spans = [BucketedSpan(step_us=60_000_000)]
    spans += [BucketedSpan(since_us=us(at), until_us=us(at + 10)) for at in range(0, 110, 10)]
    rows = [gpu_rows(requests, intervals, span=span) for span in spans]
    assert sum(row.allocated_ms for row in rows[0]) == 70_000
    assert sum(row.allocated_ms for of in rows[1:] for row in of) == 70_000
    assert [sum(row.attributed_ms for row in of) for of in rows[1:6]] == [9000, 0, 0, 0, 0]


def test_too_fine_a_resolution_is_refused():
    year = interval(end=366 * 86_400)
    with pytest.raises(InvalidRecord, match="coarser"):
        gpu_rows([], [year], span=BucketedSpan(step_us=60_000_000))


async def test_gpu_time_of_a_span_counts_what_reaches_into_it():
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
    found = await usage_reader.reconcile_ledger(state, dict)
    assert (found.verdict, found.requests) == (BalanceVerdict.EXACT, 4)
    rows = await usage_reader.grouped(state, UsageFilter(function="tiny"), ("status",), key="k0")
    assert [row["requests"] for row in rows] == [3]
