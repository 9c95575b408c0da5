"""Readers of all of a ledger's records of a kind, page by page: the loop runs other tasks between pages."""

import asyncio
import math
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from registry.accounting.gpu_shares import recorded_us, request_id_of
from registry.accounting.row_order import LedgerKind, Position, Row, position_at, position_of
from registry.accounting.usage_report import bounded, by_end, matches, overlaps
from registry.errors import InvalidRecord
from registry.records.quota import DAY_S
from registry.records.usage import InstanceInterval, LostCall, RequestRecord
from registry.state import Ledger, UsageFilter

# A page is decoded and added up without a break: few enough records not to delay other requests.
PAGE = 200
MAX_PAGE = 1000  # rows that are read at once
MAX_RECORDS = 2_000_000
MAX_INTERVALS = 1_000_000
MAX_CALLS = 4_000_000
MAX_LOST = 200_000
# A request ends at most this long before a node meters a call of it (by the node's clock), and after it.
SKEW_S = 3600.0
LONGEST_REQUEST_S = 2.0 * DAY_S


async def each_request(
    ledger: Ledger, where: UsageFilter, *, max_records: int = MAX_RECORDS
) -> AsyncIterator[RequestRecord]:
    """Yield the records that match, in order of `ended_at`.

    Raises InvalidRecord where the span of time holds more than `max_records` records of all tenants: all must
    be read.
    """
    async for page in request_pages(ledger, where, max_records=max_records):
        for record in page:
            yield record


async def request_pages(
    ledger: Ledger, where: UsageFilter, *, max_records: int | None = MAX_RECORDS
) -> AsyncIterator[list[RequestRecord]]:
    """Yield the same in pages; with None any number of records, for readers that keep none of them."""
    span = replace(where, function=None, tenant=None)
    cursor, count, half_ends_at = "", 0, -math.inf
    while True:
        page, cursor = await ledger.requests(span, limit=PAGE, cursor=cursor)
        count += len(page)
        if max_records is not None and count > max_records:
            raise too_many(max_records, "requests", half_ends_at, where.since)
        if max_records is not None and count <= max_records // 2 and page:
            half_ends_at = page[-1].ended_at
        yield [record for record in page if matches(where, record)]
        if not cursor:
            return
        await asyncio.sleep(0)


async def page_of_requests(
    page_after: Callable[[LedgerKind, Position, int], Awaitable[Sequence[Row]]],
    where: UsageFilter,
    limit: int,
    cursor: str,
) -> tuple[list[RequestRecord], str]:
    """Return `limit` records that match, and the cursor of the next ones, from pages of all records."""
    where = bounded(where)
    after, found = position_at(cursor, where.since), list[RequestRecord]()
    while rows := await page_after(LedgerKind.REQUESTS, after, min(MAX_PAGE, limit + 1)):
        for row in rows:
            assert isinstance(row, RequestRecord)
            if where.until is not None and row.ended_at >= where.until:
                return found, ""
            if matches(where, row):
                if len(found) == limit:
                    return found, position_of(found[-1]).cursor
                found.append(row)
        after = position_of(rows[-1])
    return found, ""


async def interval_pages(
    ledger: Ledger,
    *,
    since: float | None = None,
    until: float | None = None,
    max_records: int = MAX_INTERVALS,
    max_calls: int = MAX_CALLS,
    beyond_s: float = 0.0,
) -> AsyncIterator[list[InstanceInterval]]:
    """Yield the intervals that overlap `[since, until)`, in order of `to_at`, a page of few calls at a time.

    Raises InvalidRecord where more than `max_records` intervals must be read, or more than `max_calls` are
    named; the message suggests a narrower span, which ends `beyond_s` before the interval read last.
    """
    read, calls, half_ends_at = 0, 0, -math.inf
    async for page in ledger.interval_pages(since=since, until=until):
        read += len(page)
        if read > max_records:
            raise too_many(max_records, "intervals", half_ends_at - beyond_s, since)
        found = [interval for interval in page if overlaps(interval, since, until)]
        calls += sum(len(interval.calls) for interval in found)
        if calls > max_calls:
            raise too_many(max_calls, "calls", half_ends_at - beyond_s, since)
        if read <= max_records // 2 and calls <= max_calls // 2:
            half_ends_at = page[-1].to_at
        for some in _of_few_calls(found):
            yield some
            await asyncio.sleep(0)
        await asyncio.sleep(0)


async def by_end_pages(
    pages: AsyncIterator[list[InstanceInterval]],
) -> AsyncIterator[list[InstanceInterval]]:
    """Yield the intervals sorted by `by_end`, those that end together on one page.

    `pages` are in order of ends except where these are equal.
    """
    held: list[InstanceInterval] = []
    async for page in pages:
        held = by_end([*held, *page])
        upto = bisect_left(held, held[-1].to_at, key=lambda one: one.to_at)
        if upto:
            yield held[:upto]
            held = held[upto:]
    if held:
        yield held


async def lost_calls(
    ledger: Ledger, *, since: float | None = None, until: float | None = None, max_records: int = MAX_LOST
) -> list[LostCall]:
    """Return the lost calls that ended in `[since, until)`. Raises InvalidRecord for too many."""
    found: list[LostCall] = []
    half_ends_at = -math.inf
    async for page in ledger.lost_call_pages(since=since, until=until):
        found += page
        if len(found) > max_records:
            raise too_many(max_records, "lost calls", half_ends_at, since)
        if len(found) <= max_records // 2 and page:
            half_ends_at = page[-1].ended_at
        await asyncio.sleep(0)
    return found


def too_many(max_records: int, what: str, half_ends_at: float, since: float | None) -> InvalidRecord:
    """Return the error for more than `max_records` records; half of them or more end by `half_ends_at`."""
    until = math.floor(half_ends_at) if math.isfinite(half_ends_at) else -1
    if until <= max(0, since or 0):
        return InvalidRecord(f"more than {max_records} {what}: narrow the time with since and until")
    moment = datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return InvalidRecord(
        f"more than {max_records} {what}: narrow the time, "
        f"first to until={until} ({moment}), then from there on"
    )


async def records_of(
    ledger: Ledger,
    calls: Collection[tuple[str, str]],
    *,
    since: float | None = None,
    until: float | None = None,
) -> dict[tuple[str, str], RequestRecord]:
    """Return the records of calls that ran in `[since, until)`, by call and instance.

    Calls in flight have none.
    """
    since = None if since is None else since - SKEW_S
    until = None if until is None else until + LONGEST_REQUEST_S
    found: dict[tuple[str, str], RequestRecord] = {}
    names = {call: request_id_of(call[0]) for call in calls}
    records = {one.request_id: one for one in await _by_id(ledger, sorted(set(names.values())), since, until)}
    for call, name in names.items():
        record = records.get(name)
        if record is not None and recorded_us(record, *call):
            found[call] = record
    return found


async def _by_id(
    ledger: Ledger, names: Sequence[str], since: float | None, until: float | None
) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    for start in range(0, len(names), PAGE):
        found += await ledger.requests_by_id(names[start : start + PAGE], since=since, until=until)
        await asyncio.sleep(0)
    return found


def _of_few_calls(intervals: Sequence[InstanceInterval]) -> Iterator[list[InstanceInterval]]:
    """Yield the intervals in groups that name about a page of calls, or one interval more."""
    group: list[InstanceInterval] = []
    calls = 0
    for interval in intervals:
        group.append(interval)
        calls += len(interval.calls)
        if calls >= PAGE:
            yield group
            group, calls = [], 0
    if group:
        yield group
