"""Chunks of the records of a report, which are added up by any of their fields: a page, or a whole file."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

from registry.accounting.ledger_pages import request_pages
from registry.accounting.usage_report import UsageTotals, amounts_of, day_of
from registry.records.quota import DAY_S
from registry.records.usage import RequestRecord
from registry.state import Ledger, Tally, UsageChunk, UsageFilter

HOUR_S = 3600
_INLINE = 1000  # tallies that are added without a thread

Value: TypeAlias = str | int


def hour_text(hour: int) -> str:
    """Return the hour (since the epoch) as reports show it."""
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%dT%H:00Z")


def day_text(day: int) -> str:
    """Return the day (since the epoch) as reports show it."""
    return datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m-%d")


# A day or an hour is that of `ended_at`, in UTC.
FIELDS: Mapping[str, Callable[[RequestRecord], Value]] = {
    "function": lambda record: record.function,
    "tenant": lambda record: record.tenant,
    "key": lambda record: record.key_id,
    "node": lambda record: record.node,
    "version": lambda record: record.version,
    "status": lambda record: record.status.value,
    "start_kind": lambda record: record.start_kind,
    "hour": lambda record: hour_text(int(record.ended_at // HOUR_S)),
    "day": lambda record: day_text(day_of(record.ended_at)),
    "rate_id": lambda record: record.rate_id,
    "queue_ms": lambda record: record.queue_ms,
    "exec_ms": lambda record: record.exec_ms,
}


@dataclass(frozen=True, slots=True)
class RecordChunk:
    """A page of records."""

    records: Sequence[RequestRecord]

    async def tally(self, by: Sequence[str], *, counts: bool = False) -> AsyncIterator[Sequence[Tally]]:
        yield list(tally_records(self.records, by))


def tally_records(records: Iterable[RequestRecord], by: Sequence[str]) -> Iterable[Tally]:
    """Yield what each record adds to sums by some of FIELDS."""
    values = [FIELDS[name] for name in by]
    for record in records:
        yield tuple([value(record) for value in values]), amounts_of(record)


async def record_chunks(ledger: Ledger, where: UsageFilter) -> AsyncIterator[UsageChunk]:
    """Yield the records that match, page by page. Raises InvalidRecord for too many."""
    async for page in request_pages(ledger, where):
        yield RecordChunk(page)


async def add_chunks(totals: UsageTotals, chunks: AsyncIterator[UsageChunk]) -> None:
    """Add records to totals by function and tenant."""
    async for chunk in chunks:
        async for tallies in chunk.tally(("function", "tenant")):
            await add_tallies(totals.add_all, tallies)


async def add_tallies(add: Callable[[Sequence[Tally]], None], tallies: Sequence[Tally]) -> None:
    """Add tallies, in a thread where they are many."""
    if len(tallies) <= _INLINE:
        add(tallies)
    else:
        await asyncio.to_thread(add, tallies)
