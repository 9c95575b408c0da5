"""Reports over a ledger: its records are read page by page, and added up as they arrive."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from registry.accounting import gpu_report
from registry.accounting.gpu_report import GpuRow, GpuTime, lost_by_call
from registry.accounting.gpu_shares import share_busy_time
from registry.accounting.instance_account import BalanceVerdict, NamedCall, TimeSpan
from registry.accounting.ledger_pages import (
    PAGE,
    by_end_pages,
    each_request,
    interval_pages,
    lost_calls,
    records_of,
    too_many,
)
from registry.accounting.reconciliation import (
    MARGIN_S,
    InstanceBalance,
    NodeBalance,
    Reconciler,
    Reconciliation,
    micros,
)
from registry.accounting.usage_chunks import add_tallies
from registry.accounting.usage_groups import GroupedSums, PeriodSums, SummaryRow, Value
from registry.accounting.usage_report import LONGEST_INTERVAL_S
from registry.records.usage import InstanceInterval
from registry.state import Ledger, UsageFilter

# A reconciliation keeps each of them, about half a kilobyte.
MAX_RETAINED = 500_000
_MAX_READS = 4  # of a ledger that seems to be wrong


async def grouped(
    ledger: Ledger, where: UsageFilter, by: Sequence[str], *, key: str | None = None
) -> list[dict[str, Value]]:
    """Return sums by any properties; with `key`, of the requests of one API key. Raises InvalidRecord."""
    sums = GroupedSums(by)
    async for chunk in ledger.usage_chunks(where):
        columns = by if key is None else (*by, "key")
        async for tallies in chunk.tally(columns):
            await add_tallies(partial(sums.add_tallies, key=key), tallies)
    return await asyncio.to_thread(sums.rows)


async def summary(ledger: Ledger, where: UsageFilter) -> list[SummaryRow]:
    """Return the summary of a period. Raises InvalidRecord."""
    found = PeriodSums(await ledger.rates())
    async for chunk in ledger.usage_chunks(where):
        for name in found.COUNTED:
            async for tallies in chunk.tally((*found.GROUP, name), counts=name != "status"):
                await add_tallies(partial(found.add_tallies, name), tallies)
    return await asyncio.to_thread(found.rows)


async def gpu_time(ledger: Ledger, where: UsageFilter, by: Sequence[str], *, step_s: int = 0) -> list[GpuRow]:
    """Return GPU time in `[since, until)`, as far as nodes have written it. Raises InvalidRecord."""
    return await asyncio.to_thread((await gpu_sums(ledger, where, by, step_s=step_s)).rows)


async def gpu_sums(ledger: Ledger, where: UsageFilter, by: Sequence[str], *, step_s: int = 0) -> GpuTime:
    """Return the same to the microsecond. Raises InvalidRecord."""
    span = gpu_report.BucketedSpan(
        since_us=None if where.since is None else micros(where.since),
        until_us=None if where.until is None else micros(where.until),
        step_us=step_s * 1_000_000,
    )
    time = GpuTime(span=span, by=by, function=where.function, tenant=where.tenant)
    # A call is lost after the start of the interval that names it, and soon after: no request lasts for days.
    since = None if where.since is None else where.since - LONGEST_INTERVAL_S
    until = None if where.until is None else where.until + LONGEST_INTERVAL_S
    lost = lost_by_call(await lost_calls(ledger, since=since, until=until))
    async for page in interval_pages(ledger, since=where.since, until=where.until):
        wanted = [one for one in page if where.function in (None, one.function)]
        calls = {(part.call_id, one.instance_id) for one in wanted for part in one.calls}
        records = await records_of(ledger, calls, **_moments(page))
        for interval in wanted:
            time.add(interval, share_busy_time(interval, records, lost))
    return time


async def reconcile_ledger(
    ledger: Ledger,
    live: Callable[[], Mapping[str, str]],
    *,
    since: float | None = None,
    until: float | None = None,
    max_retained: int = MAX_RETAINED,
) -> Reconciliation:
    """Reconcile the ledger, or the part of it in `[since, until)`.

    `live` returns the running instances, with their nodes. Raises InvalidRecord.
    """
    requested = TimeSpan(-math.inf if since is None else since, math.inf if until is None else until)
    found = await _balance(ledger, live, requested, max_retained)
    for _ in range(_MAX_READS - 1):
        if found.verdict is not BalanceVerdict.WRONG:
            break
        # Late records have earlier times, maybe of pages read already: then two readings differ.
        before, found = found, await _balance(ledger, live, requested, max_retained)
        if _wrong(before) & _wrong(found):
            break
    return found


def _wrong(found: Reconciliation) -> set[tuple[object, int]]:
    """Return the wrong balances, each with its node's allocated time, which grows with late intervals."""
    allocated_us = {one.node: one.allocated_us for one in found.nodes}
    balances: list[InstanceBalance | NodeBalance] = [*found.instances, *found.nodes]
    return {(one, allocated_us.get(one.node, 0)) for one in balances if one.verdict is BalanceVerdict.WRONG}


async def _balance(
    ledger: Ledger, live: Callable[[], Mapping[str, str]], requested: TimeSpan, max_retained: int
) -> Reconciliation:
    before = live()
    # In this order: a record written meanwhile is then merely ahead of its interval.
    reconciler = Reconciler(requested)
    since, until, half_ends_at = _finite(reconciler.read.since), _finite(reconciler.read.until), -math.inf
    async for page in by_end_pages(interval_pages(ledger, since=since, until=until, beyond_s=MARGIN_S)):
        reconciler.add_intervals(page)
        await _compare(ledger, reconciler, reconciler.pop_ended_calls(), **_moments(page))
        if reconciler.retained > max_retained:
            what = "instances, calls in flight and calls that differ from their records"
            raise too_many(max_retained, what, half_ends_at - MARGIN_S, requested.since)
        if reconciler.retained <= max_retained // 2:
            half_ends_at = page[-1].to_at
    await _compare(ledger, reconciler, reconciler.pop_open_calls())
    # A call is lost soon after an interval names it, or before an interval reports that it is over.
    since = _finite(reconciler.read.since - LONGEST_INTERVAL_S)
    until = _finite(reconciler.read.until + LONGEST_INTERVAL_S)
    async for lost in ledger.lost_call_pages(since=since, until=until):
        calls = {(one.call_id, one.instance_id) for one in lost}
        ends = [one.ended_at for one in lost] or [0.0]
        times = {"since": min(ends) - LONGEST_INTERVAL_S, "until": max(ends)}
        reconciler.add_lost(lost, await records_of(ledger, calls, **times))
        await asyncio.sleep(0)
    where = UsageFilter(since=_finite(requested.since), until=_finite(requested.until))
    async for record in each_request(ledger, where):
        reconciler.add(record)
    return await asyncio.to_thread(reconciler.result, live={**before, **live()})


async def _compare(
    ledger: Ledger, reconciler: Reconciler, calls: Sequence[NamedCall], **times: float
) -> None:
    for start in range(0, len(calls), PAGE):
        some = calls[start : start + PAGE]
        reconciler.compare(some, await records_of(ledger, {call.name for call in some}, **times))


def _moments(page: Sequence[InstanceInterval]) -> dict[str, float]:
    """Return the times in which calls that these intervals name ran: one may be settled a while after."""
    if not page:
        return {}
    since = min(one.from_at for one in page) - LONGEST_INTERVAL_S
    return {"since": since, "until": max(one.to_at for one in page)}


def _finite(at: float) -> float | None:
    return at if math.isfinite(at) else None
