"""Reports over a ledger: its records are read a page at a time, and added up as they come."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from registry import gpu_report
from registry.conservation import MARGIN_S, Balances, Conservation, InstanceBalance, NodeBalance, micros
from registry.gpu_report import GpuRow, GpuTime, lost_by_call
from registry.gpu_shares import shares
from registry.instance_books import Named, Span, Verdict
from registry.ledger_pages import (
    PAGE,
    by_end_pages,
    each_request,
    interval_pages,
    lost_calls,
    records_of,
    too_many,
)
from registry.state import Ledger, UsageFilter
from registry.usage_groups import GroupedSums, GroupRow, Summary, SummaryRow
from registry.usage_report import LONGEST_INTERVAL_S

# A check keeps each of these, about half a kilobyte.
MAX_HELD = 500_000
_MOST_READS = 4  # of what seems to be wrong


async def grouped(
    ledger: Ledger, where: UsageFilter, by: Sequence[str], *, key: str | None = None
) -> list[GroupRow]:
    """Sums by any properties; with `key`, over the requests of one API key. Raises InvalidRecord."""
    sums = GroupedSums(by)
    async for record in each_request(ledger, where):
        if key in (None, record.key_id):
            sums.add(record)
    return sums.rows()


async def summary(ledger: Ledger, where: UsageFilter) -> list[SummaryRow]:
    """What a period held. Raises InvalidRecord."""
    found = Summary(await ledger.rates())
    async for record in each_request(ledger, where):
        found.add(record)
    return found.rows()


async def gpu_time(ledger: Ledger, where: UsageFilter, by: Sequence[str], *, step_s: int = 0) -> list[GpuRow]:
    """GPU time in `[since, until)`, as far as nodes have written it down. Raises InvalidRecord."""
    return await asyncio.to_thread((await gpu_sums(ledger, where, by, step_s=step_s)).rows)


async def gpu_sums(ledger: Ledger, where: UsageFilter, by: Sequence[str], *, step_s: int = 0) -> GpuTime:
    """The same, to the microsecond. Raises InvalidRecord."""
    span = gpu_report.Span(
        since_us=None if where.since is None else micros(where.since),
        until_us=None if where.until is None else micros(where.until),
        step_us=step_s * 1_000_000,
    )
    time = GpuTime(span=span, by=by, function=where.function, tenant=where.tenant)
    # A call is lost after the interval that names it began, and before long: no request lasts for days.
    since = None if where.since is None else where.since - LONGEST_INTERVAL_S
    until = None if where.until is None else where.until + LONGEST_INTERVAL_S
    lost = lost_by_call(await lost_calls(ledger, since=since, until=until))
    async for page in interval_pages(ledger, since=where.since, until=where.until):
        wanted = [one for one in page if where.function in (None, one.function)]
        calls = {(part.call_id, one.instance_id) for one in wanted for part in one.calls}
        records = await records_of(ledger, calls)
        for interval in wanted:
            time.add(interval, shares(interval, records, lost))
    return time


async def balance(
    ledger: Ledger,
    live: Callable[[], Mapping[str, str]],
    *,
    since: float | None = None,
    until: float | None = None,
    most_held: int = MAX_HELD,
) -> Conservation:
    """Whether the ledger adds up, the whole or what of it is of `[since, until)`; `live` tells the instances
    that there are, with their nodes.

    Raises InvalidRecord.
    """
    asked = Span(-math.inf if since is None else since, math.inf if until is None else until)
    found = await _balance(ledger, live, asked, most_held)
    for _ in range(_MOST_READS - 1):
        if found.verdict is not Verdict.WRONG:
            break
        # What comes late has times of before, maybe where was read already: then two readings differ.
        before, found = found, await _balance(ledger, live, asked, most_held)
        if _wrong(before) & _wrong(found):
            break
    return found


def _wrong(found: Conservation) -> set[tuple[object, int]]:
    """What is wrong, each with what its node has allocated: that grows with all that comes late."""
    allocated_us = {one.node: one.allocated_us for one in found.nodes}
    balances: list[InstanceBalance | NodeBalance] = [*found.instances, *found.nodes]
    return {(one, allocated_us.get(one.node, 0)) for one in balances if one.verdict is Verdict.WRONG}


async def _balance(
    ledger: Ledger, live: Callable[[], Mapping[str, str]], asked: Span, most_held: int
) -> Conservation:
    before = live()
    # In this order: what is written meanwhile is then merely ahead of its interval.
    balances = Balances(asked)
    since, until, fits = _finite(balances.read.since), _finite(balances.read.until), -math.inf
    async for page in by_end_pages(interval_pages(ledger, since=since, until=until, beyond_s=MARGIN_S)):
        balances.add_intervals(page)
        await _compare(ledger, balances, balances.named())
        if balances.held > most_held:
            what = "instances, calls in flight and calls that differ from their records"
            raise too_many(most_held, what, fits - MARGIN_S, asked.since)
        if balances.held <= most_held // 2:
            fits = page[-1].to_at
    await _compare(ledger, balances, balances.left())
    # A call is lost after an interval names it and before long, or before one says that it is over.
    since = _finite(balances.read.since - LONGEST_INTERVAL_S)
    until = _finite(balances.read.until + LONGEST_INTERVAL_S)
    async for lost in ledger.lost_call_pages(since=since, until=until):
        calls = {(one.call_id, one.instance_id) for one in lost}
        balances.add_lost(lost, await records_of(ledger, calls))
        await asyncio.sleep(0)
    where = UsageFilter(since=_finite(asked.since), until=_finite(asked.until))
    async for record in each_request(ledger, where):
        balances.add(record)
    return await asyncio.to_thread(balances.result, live={**before, **live()})


async def _compare(ledger: Ledger, balances: Balances, calls: Sequence[Named]) -> None:
    for start in range(0, len(calls), PAGE):
        some = calls[start : start + PAGE]
        balances.compare(some, await records_of(ledger, {call.name for call in some}))


def _finite(at: float) -> float | None:
    return at if math.isfinite(at) else None
