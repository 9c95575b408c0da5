"""All of a ledger's records of a kind, a page at a time: the loop goes on between pages."""

import asyncio
import math
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from registry.errors import InvalidRecord
from registry.gpu_shares import recorded_us, request_ids
from registry.state import Ledger, UsageFilter
from registry.usage import InstanceInterval, LostCall, RequestRecord
from registry.usage_report import by_end, matches, overlaps

# A page is decoded and added up in one go: few enough for other requests not to notice.
PAGE = 200
MAX_RECORDS = 2_000_000
MAX_INTERVALS = 1_000_000
MAX_CALLS = 4_000_000
MAX_LOST = 200_000


async def each_request(
    ledger: Ledger, where: UsageFilter, *, most: int = MAX_RECORDS
) -> AsyncIterator[RequestRecord]:
    """The records that match, in order of `ended_at`. Raises InvalidRecord where the span of time holds
    more than `most`, of whomever: all of them must be read."""
    span = replace(where, function=None, tenant=None)
    cursor, count, fits = "", 0, -math.inf
    while True:
        page, cursor = await ledger.requests(span, limit=PAGE, cursor=cursor)
        count += len(page)
        if count > most:
            raise too_many(most, "requests", fits, where.since)
        if count <= most // 2 and page:
            fits = page[-1].ended_at
        for record in page:
            if matches(where, record):
                yield record
        if not cursor:
            return
        await asyncio.sleep(0)


async def interval_pages(
    ledger: Ledger,
    *,
    since: float | None = None,
    until: float | None = None,
    most: int = MAX_INTERVALS,
    most_calls: int = MAX_CALLS,
    beyond_s: float = 0.0,
) -> AsyncIterator[list[InstanceInterval]]:
    """The intervals that overlap `[since, until)`, in order of `to_at`, a page of few calls at a time. Raises
    InvalidRecord where more than `most` must be read for it, or more than `most_calls` are named; whoever
    asked for a time that ends `beyond_s` before `until` is told how to narrow that."""
    read, calls, fits = 0, 0, -math.inf
    async for page in ledger.interval_pages(since=since, until=until):
        read += len(page)
        if read > most:
            raise too_many(most, "intervals", fits - beyond_s, since)
        found = [interval for interval in page if overlaps(interval, since, until)]
        calls += sum(len(interval.calls) for interval in found)
        if calls > most_calls:
            raise too_many(most_calls, "calls", fits - beyond_s, since)
        if read <= most // 2 and calls <= most_calls // 2:
            fits = page[-1].to_at
        for some in _of_few_calls(found):
            yield some
            await asyncio.sleep(0)
        await asyncio.sleep(0)


async def by_end_pages(
    pages: AsyncIterator[list[InstanceInterval]],
) -> AsyncIterator[list[InstanceInterval]]:
    """The same intervals `by_end`, those that end together on one page; `pages` are in order of ends but
    where these are equal."""
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
    ledger: Ledger, *, since: float | None = None, until: float | None = None, most: int = MAX_LOST
) -> list[LostCall]:
    """Those that ended in `[since, until)`. Raises InvalidRecord for more than `most`."""
    found: list[LostCall] = []
    fits = -math.inf
    async for page in ledger.lost_call_pages(since=since, until=until):
        found += page
        if len(found) > most:
            raise too_many(most, "lost calls", fits, since)
        if len(found) <= most // 2 and page:
            fits = page[-1].ended_at
        await asyncio.sleep(0)
    return found


def too_many(most: int, what: str, fits: float, since: float | None) -> InvalidRecord:
    """The error where there are more; up to the moment that `fits` there was half of it."""
    until = math.floor(fits) if math.isfinite(fits) else -1
    if until <= max(0, since or 0):
        return InvalidRecord(f"more than {most} {what}: narrow the time with since and until")
    moment = datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return InvalidRecord(
        f"more than {most} {what}: narrow the time, first to until={until} ({moment}), then from there on"
    )


async def records_of(
    ledger: Ledger, calls: Collection[tuple[str, str]]
) -> dict[tuple[str, str], RequestRecord]:
    """The records of calls, by call and instance; calls in flight have none."""
    found: dict[tuple[str, str], RequestRecord] = {}
    for choice in (0, 1):  # a request id that was taken already has something added
        names = {call: request_ids(call[0])[choice] for call in calls if call not in found}
        records = {one.request_id: one for one in await _by_id(ledger, sorted(set(names.values())))}
        for call, name in names.items():
            record = records.get(name)
            if record is not None and recorded_us(record, *call):
                found[call] = record
    return found


async def _by_id(ledger: Ledger, names: Sequence[str]) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    for start in range(0, len(names), PAGE):
        found += await ledger.requests_by_id(names[start : start + PAGE])
        await asyncio.sleep(0)
    return found


def _of_few_calls(intervals: Sequence[InstanceInterval]) -> Iterator[list[InstanceInterval]]:
    """The same intervals in groups that name about a page of calls, or one interval more."""
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
