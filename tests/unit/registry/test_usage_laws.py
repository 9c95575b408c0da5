"""Laws of usage reports, over ledgers as histories with failovers, kills and stepped clocks leave them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from registry.accounting.gpu_report import GpuTime
from registry.accounting.reconciliation import BalanceVerdict, micros, reconcile
from registry.accounting.usage_reader import gpu_sums, reconcile_ledger
from registry.memory.state import MemoryState
from registry.state import UsageFilter
from tests.fixtures import usage
from tests.fixtures.usage_histories import ORIGIN_S, History, Ledger, Operations

# To shrink a history takes minutes: it is shown as it was found.
modest = settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
Cuts = st.lists(st.integers(-100_000_000, 1_000_000_000), min_size=1, max_size=4, unique=True)


async def state_of(ledger: Ledger) -> MemoryState:
    return await usage.state_of(ledger.records, ledger.intervals, ledger.lost)


def totals(times: Sequence[GpuTime]) -> Counter[str]:
    """All microseconds; none of them below zero anywhere."""
    found: Counter[str] = Counter()
    for time in times:
        for sums in time.sums.values():
            amounts = {
                "allocated": sums.used_us + sums.loading_us + sums.idle_us,
                "used": sums.used_us,
                "billed": sums.billed_us,
                "loading": sums.loading_us,
                "idle": sums.idle_us,
                "lost": sums.lost_us,
            }
            assert min(amounts.values()) >= 0 and sums.lost_us <= sums.idle_us
            found.update(amounts)
    return found


def present_us(ledger: Ledger, since_us: int, until_us: int) -> int:
    return sum(
        max(0, min(until_us, micros(one.to_at)) - max(since_us, micros(one.from_at)))
        for one in ledger.intervals
    )


@given(Operations, Cuts)
@modest
async def test_gpu_time_of_any_times_that_make_up_the_whole_adds_up_to_it(operations, cuts):
    ledger = History(operations).end()
    state = await state_of(ledger)
    whole = totals([await gpu_sums(state, UsageFilter(), ())])
    lost = Counter({call.call_id: call.used_us for call in ledger.lost})
    for record in ledger.records:
        lost.subtract({part.call_id: part.gpu_us for part in record.gpu if part.call_id in lost})
    used_us = sum(part.gpu_us for record in ledger.records for part in record.gpu)
    assert whole["allocated"] == sum(one.allocated_us for one in ledger.intervals)
    assert whole["loading"] == sum(one.loading_us for one in ledger.intervals)
    assert whole["billed"] == sum(record.billed_gpu_ms for record in ledger.records) * 1000
    assert whole["used"] == used_us
    assert whole["lost"] == sum(max(0, us) for us in lost.values())
    assert whole["used"] + whole["lost"] == sum(one.busy_us for one in ledger.intervals)
    edges = [None, *(ORIGIN_S + cut / 1e6 for cut in sorted(cuts)), None]
    for step_s in (0, 60, 3600):
        parts = [
            await gpu_sums(state, UsageFilter(since=since, until=until), ("tenant",), step_s=step_s)
            for since, until in pairwise(edges)
        ]
        assert totals(parts) == whole


@given(Operations, Cuts)
@modest
async def test_gpu_time_is_the_same_by_any_grouping_and_lies_where_instances_were(operations, cuts):
    ledger = History(operations).end()
    since_us, until_us = micros(ORIGIN_S) + min(cuts), micros(ORIGIN_S) + max(cuts)
    state = await state_of(ledger)
    where = UsageFilter(since=since_us / 1e6, until=until_us / 1e6)
    whole = totals([await gpu_sums(state, where, ())])
    # Moments are floats: a microsecond an interval and edge.
    assert whole["allocated"] <= present_us(ledger, since_us, until_us) + 2 * len(ledger.intervals)
    for by in (("tenant",), ("node",), ("function",), ("function", "tenant", "node")):
        assert totals([await gpu_sums(state, where, by, step_s=60)]) == whole
    for name, values in (("function", ("tiny", "big")),):
        parts = [await gpu_sums(state, replace(where, **{name: value}), ()) for value in values]
        assert totals(parts) == whole
    of_tenants = [await gpu_sums(state, replace(where, tenant=tenant), ()) for tenant in ("acme", "other")]
    found = totals(of_tenants)
    assert (found["used"], found["billed"]) == (whole["used"], whole["billed"])


@given(Operations, st.booleans())
@modest
async def test_no_ledger_of_a_correct_history_is_wrong_and_at_its_end_it_is_exact(operations, settled):
    history = History([])
    for number, operation in enumerate(operations):
        history.do(*operation)
        if number % 5 == 0:
            ledger = history.ledger
            found = reconcile(ledger.records, ledger.intervals, ledger.lost, live=ledger.live)
            assert found.verdict is not BalanceVerdict.WRONG, str(found)
    ledger = history.end(settled=settled)
    found = await reconcile_ledger(await state_of(ledger), dict)
    assert found.verdict is BalanceVerdict.EXACT, str(found)


@given(Operations, st.data())
@modest
def test_a_row_that_is_doubled_dropped_or_altered_is_found(operations, data):
    ledger = History([*operations, (0, 0, 5), (2, 0, 9_000), (3, 0, 5), (6, 0, 70_000)]).end()
    records, intervals, lost = list(ledger.records), list(ledger.intervals), list(ledger.lost)

    def verdict() -> BalanceVerdict:
        return reconcile(records, intervals, lost).verdict

    assert verdict() is BalanceVerdict.EXACT
    used = [number for number, one in enumerate(records) if one.gpu]
    spent = [number for number, one in enumerate(intervals) if one.allocated_us]
    kind = data.draw(st.sampled_from(["record", "interval", "slice", "busy", "idle", "lost"]))
    covered = {(one.call_id, one.instance_id) for one in lost}
    match kind:
        case "record" if used:
            at = data.draw(st.sampled_from(used))
            again = msgspec.structs.replace(records[at], request_id="another")
            before, records = records, [*records, again]
            assert verdict() is BalanceVerdict.WRONG
            records = [one for one in before if one is not before[at]]
            reported = any((part.call_id, part.instance_id) not in covered for part in before[at].gpu)
            assert verdict() is (
                BalanceVerdict.WRONG if reported else BalanceVerdict.EXACT
            )  # else a LostCall stands for it
        case "interval" if spent:
            at = data.draw(st.sampled_from(spent))
            one = intervals[at]
            intervals = [*intervals, replace(one, state="another")]
            assert verdict() is BalanceVerdict.WRONG
            intervals = [other for other in ledger.intervals if other is not one]
            if one.final:  # it may be written yet; where nobody used it, it may be all there was
                assert verdict() is BalanceVerdict.OPEN or not one.busy_us
            else:
                assert verdict() is BalanceVerdict.WRONG
        case "slice" if used:
            at = data.draw(st.sampled_from(used))
            part = records[at].gpu[0]
            by_us = data.draw(st.sampled_from([1, 1000]))
            slices = (msgspec.structs.replace(part, gpu_us=part.gpu_us + by_us), *records[at].gpu[1:])
            records[at] = msgspec.structs.replace(records[at], gpu=slices)
            hidden = (part.call_id, part.instance_id) in covered
            assert verdict() is BalanceVerdict.WRONG or hidden
        case "busy":
            at = data.draw(st.sampled_from(spent))
            intervals[at] = replace(intervals[at], busy_us=intervals[at].busy_us + 1)
            assert verdict() is BalanceVerdict.WRONG
        case "idle":
            at = data.draw(st.sampled_from(spent))
            over_us = len(intervals) * 1000 + 1
            intervals[at] = replace(intervals[at], idle_us=intervals[at].idle_us + over_us)
            assert verdict() is BalanceVerdict.WRONG
        case "lost" if lost:
            at = data.draw(st.sampled_from(range(len(lost))))
            lost[at] = replace(lost[at], used_us=lost[at].used_us + 1_000_000)
            assert verdict() is BalanceVerdict.WRONG


@given(Operations, st.booleans(), st.data())
@modest
def test_time_that_records_swap_or_name_otherwise_is_found(operations, settled, data):
    more = [(0, 0, 5), (2, 0, 9_000), *[(3, 0, 5)] * 3, (7, 0, 400_000), (9, 0, 70_000)]
    ledger = History([*operations, *more]).end(settled=settled)
    records, covered = ledger.records, {(one.call_id, one.instance_id) for one in ledger.lost}
    reported = [
        (number, at)
        for number, record in enumerate(records)
        for at, part in enumerate(record.gpu)
        if (part.call_id, part.instance_id) not in covered
    ]
    one, other = (data.draw(st.sampled_from(reported)) for _ in range(2))

    def altered(place: tuple[int, int], **changes: object) -> None:
        number, at = place
        parts = list(records[number].gpu)
        parts[at] = msgspec.structs.replace(parts[at], **changes)
        records[number] = msgspec.structs.replace(records[number], gpu=tuple(parts))

    used_us = records[one[0]].gpu[one[1]].gpu_us
    call_id = records[one[0]].gpu[one[1]].call_id
    if one != other:
        by_us = data.draw(st.integers(1, used_us))
        altered(one, gpu_us=used_us - by_us)
        altered(other, gpu_us=records[other[0]].gpu[other[1]].gpu_us + by_us)
    else:
        altered(one, call_id=f"{call_id}+9")
    found = reconcile(records, ledger.intervals, ledger.lost)
    assert found.verdict is BalanceVerdict.WRONG, str(found)
