"""All of a ledger's records of a kind, a page at a time: the loop goes on between pages."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from registry.errors import InvalidRecord
from registry.state import Ledger, UsageFilter
from registry.usage import InstanceInterval, RequestRecord
from registry.usage_report import matches

# A page is decoded and added up in one go: few enough for other requests not to notice.
PAGE = 200
MAX_RECORDS = 2_000_000
MAX_INTERVALS = 1_000_000


async def each_request(
    ledger: Ledger, where: UsageFilter, *, most: int = MAX_RECORDS
) -> AsyncIterator[RequestRecord]:
    """The records that match, in order of `ended_at`. Raises InvalidRecord where the span of time holds
    more than `most`, of whomever: all of them must be read."""
    span = replace(where, function=None, tenant=None)
    cursor, count = "", 0
    while True:
        page, cursor = await ledger.requests(span, limit=PAGE, cursor=cursor)
        count += len(page)
        if count > most:
            raise InvalidRecord(f"more than {most} requests: narrow the time with since and until")
        for record in page:
            if matches(where, record):
                yield record
        if not cursor:
            return
        await asyncio.sleep(0)


async def interval_pages(
    ledger: Ledger, *, since: float | None = None, until: float | None = None, most: int = MAX_INTERVALS
) -> AsyncIterator[list[InstanceInterval]]:
    """The intervals that overlap `[since, until)`, in no order. Raises InvalidRecord for more than `most`."""
    count = 0
    async for page in ledger.interval_pages(since=since, until=until):
        count += len(page)
        if count > most:
            raise InvalidRecord(f"more than {most} intervals: narrow the time with since and until")
        yield page
        await asyncio.sleep(0)
