"""Reports over a ledger: its records are read a page at a time, and added up as they come."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from registry.conservation import Balances, Conservation, LostCalls, micros
from registry.errors import NotFound
from registry.gpu_report import GpuRow, GpuTime, Span
from registry.ledger_pages import each_request, interval_pages
from registry.state import Ledger, UsageFilter
from registry.usage_groups import GroupedSums, GroupRow, Summary, SummaryRow


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


async def gpu_time(
    ledger: Ledger, where: UsageFilter, by: Sequence[str], *, step_s: int = 0, longest_s: float
) -> list[GpuRow]:
    """GPU time in `[since, until)`. No request lasts longer than `longest_s`. Raises InvalidRecord."""
    span = Span(
        since_us=None if where.since is None else micros(where.since),
        until_us=None if where.until is None else micros(where.until),
        step_us=step_s * 1_000_000,
    )
    lost = LostCalls(await ledger.lost_calls(since=where.since, until=where.until))
    time = GpuTime(span=span, by=by, lost=lost, function=where.function, tenant=where.tenant)
    async for page in interval_pages(ledger, since=where.since, until=where.until):
        time.add_intervals(page)
    # A request that ends after the span may have begun within it.
    until = None if where.until is None else where.until + longest_s
    reaching = replace(where, until=until, function=None, tenant=None)
    async for record in each_request(ledger, reaching):
        time.add(record)
    await _look_up(ledger, lost)
    return await asyncio.to_thread(time.rows)


async def balance(ledger: Ledger, live: Callable[[], Mapping[str, str]]) -> Conservation:
    """Whether the whole ledger adds up; `live` tells the instances that there are, with their nodes.

    Raises InvalidRecord.
    """
    before = live()
    # Records come last: one that is written meanwhile is then merely ahead of its interval.
    balances = Balances()
    async for page in interval_pages(ledger):
        balances.add_intervals(page)
    balances.add_lost(await ledger.lost_calls())
    async for record in each_request(ledger, UsageFilter()):
        balances.add(record)
    return await asyncio.to_thread(balances.result, live={**before, **live()})


async def _look_up(ledger: Ledger, lost: LostCalls) -> None:
    """Show the records of lost calls that ended outside of the span."""
    for request_id in lost.unseen():
        try:
            lost.add(await ledger.request(request_id))
        except NotFound:
            continue
