"""The check of some times of a ledger: it proves what it can, and reports what it cannot."""

import re
from dataclasses import replace

import msgspec
import pytest

from registry.accounting.ledger_pages import each_request, interval_pages
from registry.accounting.reconciliation import MARGIN_S, BalanceVerdict, TimeSpan, reconcile
from registry.accounting.usage_reader import reconcile_ledger
from registry.errors import InvalidRecord
from registry.records.usage import InstanceInterval, LostCall, RequestRecord
from registry.state import UsageFilter
from tests.fixtures.usage import NOW, done, interval, lost, part, state_of, used

HOUR = 3600.0


def long_life(hours: int = 10) -> tuple[list[RequestRecord], list[InstanceInterval]]:
    """Return an instance that serves a call each ten minutes, settled a minute later."""
    records, intervals = [], []
    for number in range(hours * 6):
        start, call = 600.0 * number, f"r{number}/0"
        first = interval("i0", start, start + 300, calls=(part(call, 0, 500 + number),), idle_us=0)
        then = interval(
            "i0", start + 300, start + 600, calls=(part(call, 500 + number, 600 + number, over=True),)
        )
        idle_us = 300_000_000 - (500 + number)
        intervals.append(replace(first, idle_us=idle_us, earlier_us=600_000_000 * number))
        idle_us = 300_000_000 - 100
        intervals.append(replace(then, idle_us=idle_us, earlier_us=600_000_000 * number + 300_000_000))
        records.append(done(f"r{number}", used(600 + number, call), start=start, end=start + 400))
    intervals[-1] = replace(intervals[-1], final=True)
    return records, intervals


def asked(since: float, until: float) -> TimeSpan:
    return TimeSpan(NOW + since, NOW + until)


def verdict_of(
    records: list[RequestRecord], intervals: list[InstanceInterval], *calls: LostCall, **given: object
) -> BalanceVerdict:
    return reconcile(records, intervals, calls, **given).verdict


SPANS = [asked(0, 10 * HOUR), asked(3 * HOUR, 4 * HOUR), asked(3.1 * HOUR, 3.2 * HOUR), asked(-HOUR, HOUR)]


@pytest.mark.parametrize("span", SPANS)
def test_some_times_of_a_long_life_are_exact(span: TimeSpan) -> None:
    records, intervals = long_life()
    found = reconcile(records, intervals, [], requested=span)
    assert found.verdict is BalanceVerdict.EXACT, str(found)
    assert found.requests == sum(span.holds(record.ended_at) for record in records) > 0
    # What is not there to be read is neither wrong nor open: the instance goes on.
    assert verdict_of(records, intervals, requested=span, live={"i0": "n0"}) is BalanceVerdict.EXACT


def test_what_is_wrong_is_found_in_its_times() -> None:
    records, intervals = long_life()
    at = 20  # ends after 3 h 26 min
    fewer = [
        *records[:at],
        msgspec.structs.replace(records[at], gpu=(used(599, f"r{at}/0"),)),
        *records[at + 1 :],
    ]
    moved = msgspec.structs.replace(fewer[at + 1], gpu=(used(600 + at + 2, f"r{at + 1}/0"),))
    swapped = [*fewer[: at + 1], moved, *fewer[at + 2 :]]
    gap = [*intervals[: 2 * at], *intervals[2 * at + 1 :]]
    for rows, times in (
        (fewer, intervals),
        (swapped, intervals),
        (records[:at] + records[at + 1 :], intervals),
    ):
        assert verdict_of(rows, times, requested=asked(3 * HOUR, 4 * HOUR)) is BalanceVerdict.WRONG
        assert verdict_of(rows, times, requested=asked(6 * HOUR, 7 * HOUR)) is BalanceVerdict.EXACT
    assert verdict_of(records, gap, requested=asked(3 * HOUR, 4 * HOUR)) is BalanceVerdict.WRONG
    lost_too = reconcile(fewer, intervals, [lost(f"r{at}/0", 600 + at)], requested=asked(3 * HOUR, 4 * HOUR))
    assert lost_too.verdict is BalanceVerdict.EXACT, str(lost_too)


def test_a_record_of_a_call_that_is_not_named_near_is_unproven() -> None:
    records, intervals = long_life()
    long = done("long", used(700, "long/0"), start=0, end=3.5 * HOUR)
    found = reconcile([*records, long], intervals, [], requested=asked(3 * HOUR, 4 * HOUR))
    assert found.verdict is BalanceVerdict.UNPROVEN and "700 us" in str(found)
    elsewhere = done("long", used(700, "long/0", "i9"), start=0, end=3.5 * HOUR)
    found = reconcile([*records, elsewhere], intervals, [], requested=asked(3 * HOUR, 4 * HOUR))
    assert found.verdict is BalanceVerdict.UNPROVEN
    assert verdict_of([*records, long], intervals) is BalanceVerdict.WRONG
    # The whole life lies within the times.
    short_life = interval("i1", 3.2 * HOUR, 3.3 * HOUR, calls=(part("a/0", 0, 9),), node="n1", final=True)
    a, b = (done(name, used(9, f"{name}/0", "i1", "n1"), end=3.4 * HOUR) for name in "ab")
    for rows, verdict in (([a], BalanceVerdict.EXACT), ([a, b], BalanceVerdict.WRONG)):
        found = reconcile(
            [*records, *rows], [*intervals, short_life], [], requested=asked(3 * HOUR, 4 * HOUR)
        )
        assert found.verdict is verdict, str(found)


def test_a_first_interval_is_missed_only_where_it_would_be_read() -> None:
    records, intervals = long_life()
    span = asked(3 * HOUR, 4 * HOUR)
    later = [one for one in intervals if one.from_at >= span.since]
    assert verdict_of(records, later, requested=span) is BalanceVerdict.WRONG
    later = [one for one in intervals if one.from_at >= span.since - MARGIN_S]
    assert verdict_of(records, later, requested=span) is BalanceVerdict.EXACT


def test_lost_calls_of_other_times_are_no_matter() -> None:
    records, intervals = long_life()
    strange = lost("nobody/0", 5, at=7 * HOUR)
    early = asked(HOUR, 2 * HOUR)
    assert verdict_of(records, intervals, strange, requested=early) is BalanceVerdict.EXACT
    found = reconcile(records, intervals, [strange], requested=asked(6 * HOUR, 8 * HOUR))
    assert found.verdict is BalanceVerdict.UNPROVEN, str(found)


def test_a_node_is_compared_within_the_intervals_at_the_edges() -> None:
    """Two instances share a node; their intervals are cut at different times."""
    day = range(0, 600, 10)
    ones = [
        interval("i0", 60 * at, 60 * at + 600, idle_us=300_000_000, earlier_us=30_000_000 * at) for at in day
    ]
    others = [
        interval("i1", 60 * at + 300, 60 * at + 900, idle_us=300_000_000, earlier_us=30_000_000 * at)
        for at in day
    ]
    edges = [
        interval("i2", 0, 300, idle_us=150_000_000, final=True),
        interval("i3", 36_000, 36_300, idle_us=150_000_000, final=True),
    ]
    ends = [replace(found[-1], final=True) for found in (ones, others)]
    whole = [*ones[:-1], *others[:-1], *ends, *edges]
    assert verdict_of([], whole) is BalanceVerdict.EXACT
    for span in (asked(3.03 * HOUR, 4.05 * HOUR), asked(0, HOUR), asked(2 * HOUR, 12 * HOUR)):
        found = reconcile([], whole, [], requested=span)
        assert found.verdict is BalanceVerdict.EXACT, str(found)
    doubled = [*whole, interval("i4", 4 * HOUR, 4.5 * HOUR, final=True)]
    found = reconcile([], doubled, [], requested=asked(3 * HOUR, 5 * HOUR))
    assert found.nodes[0].verdict is BalanceVerdict.WRONG


async def test_what_a_check_keeps_does_not_grow_with_the_times() -> None:
    records, intervals = long_life()
    strange = [lost(f"nobody{number}/0", 5, at=9 * HOUR) for number in range(50)]
    state = await state_of(records, intervals, strange)
    for span in SPANS:
        found = await reconcile_ledger(state, dict, since=span.since, until=span.until, max_retained=3)
        assert found.requests == sum(span.holds(record.ended_at) for record in records)
    assert (await reconcile_ledger(state, dict, until=NOW + 8 * HOUR)).verdict is BalanceVerdict.EXACT
    assert (await reconcile_ledger(state, dict)).verdict is BalanceVerdict.WRONG


async def test_where_there_is_too_much_the_error_names_times_that_will_do() -> None:
    records, intervals = long_life(40)
    crowd = [interval(f"j{n}", 60 * n, 60 * n + 60, node=f"m{n}", final=True) for n in range(40 * 60)]
    state = await state_of(records, [*intervals, *crowd], [])
    since, checks = None, 0
    while True:
        try:
            found = await reconcile_ledger(state, dict, since=since, max_retained=1000)
            break
        except InvalidRecord as error:
            until = until_of(error)
        found = await reconcile_ledger(state, dict, since=since, until=until, max_retained=1000)
        assert found.verdict is BalanceVerdict.EXACT, str(found)
        since, checks = until, checks + 1
    assert found.verdict is BalanceVerdict.EXACT and checks >= 3
    for number in range(300):
        await state.add_request(done(f"more{number}", end=HOUR))
        await state.add_request(done(f"many{number}", end=2 * HOUR))
    with pytest.raises(InvalidRecord, match="more than 600 requests") as refused:
        [one async for one in each_request(state, UsageFilter(), max_records=600)]
    where = UsageFilter(until=until_of(refused.value))
    assert where.until == NOW + HOUR
    assert [one async for one in each_request(state, where, max_records=600)]
    with pytest.raises(InvalidRecord, match="more than 1000 intervals") as refused:
        [page async for page in interval_pages(state, max_records=1000)]
    assert [page async for page in interval_pages(state, until=until_of(refused.value), max_records=1000)]
    with pytest.raises(InvalidRecord, match="narrow the time with"):
        await reconcile_ledger(state, dict, since=NOW, until=NOW + 60, max_retained=3)


def until_of(error: InvalidRecord) -> float:
    found = re.search(r"until=(\d+) ", str(error))
    assert found is not None
    return float(found[1])
