"""The usage ledger of Redis and its archive together: reports are the same before and after archiving."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from registry.accounting.ledger_pages import MAX_PAGE, page_of_requests
from registry.accounting.ledger_pages import PAGE as INTERVALS_PAGE
from registry.accounting.row_order import LedgerKind, Position, Row, merged, position_at, position_of
from registry.accounting.usage_chunks import RecordChunk, add_chunks, record_chunks
from registry.accounting.usage_report import (
    LONGEST_INTERVAL_S,
    bounded,
    day_of,
    in_window,
    matches,
    split_days,
)
from registry.archive.files import ArchiveFiles
from registry.archive.lease import archive_lease
from registry.clock import Clock
from registry.errors import Conflict, NotFound, StaleEpoch, StateUnavailable, StoreError
from registry.records.archive import ArchiveFile, ArchiveIndex
from registry.records.quota import DAY_S
from registry.records.usage import InstanceInterval, LostCall, PriceRate, RequestRecord, RequestStatus
from registry.redis.ledger_writer import void_sums
from registry.redis.state import RedisState
from registry.state import Ledger, Tally, UsageChunk, UsageFilter, UsageRow

# A record that ended this long ago may belong to a closed day (see archiver.CLOSED_AFTER_S).
LATE_S = 1800.0
# Files that are added up together: each sum of theirs becomes a Python object once.
_CHUNK_FILES = 100

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArchivedChunk:
    """The requests of some files that match."""

    files: ArchiveFiles
    chosen: Sequence[ArchiveFile]
    where: UsageFilter

    def tally(self, by: Sequence[str], *, counts: bool = False) -> AsyncIterator[Sequence[Tally]]:
        return self.files.tally(self.chosen, self.where, by, counts=counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MergedPage:
    """Rows of both in order, those of Redis among them, and the index of that moment."""

    rows: list[Row]
    recent: list[Row]
    index: ArchiveIndex


class ArchivedLedger(Ledger):
    """The whole ledger. Its writes go to Redis; those of closed days are compared with the archive first."""

    def __init__(self, recent: RedisState, files: ArchiveFiles, clock: Clock) -> None:
        self._recent = recent
        self._files = files
        self._clock = clock
        self._index = ArchiveIndex(serial=-1)

    def __repr__(self) -> str:
        return f"<ArchivedLedger {len(self._index.files)} files {self._recent!r}>"

    async def index(self) -> ArchiveIndex:
        """Return the present index."""
        self._index = await self._recent.archive_index(self._index)
        return self._index

    # --- writes

    def add_request(self, record: RequestRecord) -> Awaitable[bool]:
        if self._clock.wall_s() - record.ended_at < LATE_S:
            return self._recent.add_request(record)
        return self._add_late(record)

    async def _add_late(self, record: RequestRecord) -> bool:
        if record.ended_at >= (await self.index()).closed:
            return await self._recent.add_request(record)
        async with self._closed_days() as epoch:
            if await self._archived(record.request_id, record.ended_at):
                return False
            return await self._recent.add_request(record, epoch=epoch)

    async def void_request(self, record: RequestRecord) -> bool:
        if record.ended_at >= (await self.index()).closed:
            return await self._recent.void_request(record)
        async with self._closed_days() as epoch:
            # The archive first: a killed archiver can leave the record in Redis, too, where it is dropped.
            for file, found in await self._archived(record.request_id, record.ended_at):
                if found == record:
                    await self._void_archived(file, record, epoch)
                return found == record
            return await self._recent.void_request(record, epoch=epoch)

    @asynccontextmanager
    async def _closed_days(self) -> AsyncIterator[int]:
        """Hold the right to write to closed days; yield its epoch. Raises StateUnavailable: retry later."""
        try:
            async with archive_lease(self._recent, self._clock) as lease:
                await self._recent.close_requests(lease.epoch, self._index.closed)
                yield lease.epoch
        except (Conflict, StaleEpoch) as error:
            raise StateUnavailable(f"a record of a closed day cannot be written yet: {error}") from error

    async def _archived(self, request_id: str, ended_at: float) -> list[tuple[ArchiveFile, RequestRecord]]:
        files = (await self.index()).of(LedgerKind.REQUESTS, day_of(ended_at) * DAY_S)
        return [
            (file, found)
            for file in files
            if file.day == day_of(ended_at)
            for found in await self._files.find(file, "request_id", [request_id])
        ]

    async def _void_archived(self, file: ArchiveFile, record: RequestRecord, epoch: int) -> None:
        def change(table: Any) -> Any:
            from registry.archive.columns import replaced  # pyarrow: 40 MB

            values = {"status": RequestStatus.FAILED.value, "cost_nanos": 0}
            return replaced(table, ("request_id", record.request_id), values)

        after = await self._files.rewrite(file, change)
        sums = void_sums(record)
        await self._recent.publish_file(epoch, after, replaces=file.digest, sums=sums)
        await self._files.delete(file)

    # --- requests

    async def request(self, request_id: str) -> RequestRecord:
        for record in await self.requests_by_id([request_id]):
            return record
        raise NotFound(f"no request {request_id}")

    async def requests_by_id(
        self, request_ids: Sequence[str], *, since: float | None = None, until: float | None = None
    ) -> list[RequestRecord]:
        # Redis first: what is archived meanwhile is in the index that is read after it.
        found = await self._recent.requests_by_id(request_ids)
        missing = set(request_ids) - {record.request_id for record in found}
        if not missing:
            return found

        async def search(index: ArchiveIndex) -> list[RequestRecord]:
            archived: list[RequestRecord] = []
            for file in reversed(index.of(LedgerKind.REQUESTS, _at(since), until)):
                if len(archived) < len(missing):
                    archived += await self._files.find(file, "request_id", missing)
            return archived

        return found + await self._consistent(search)

    async def requests_by_client_id(self, client_request_id: str, *, limit: int = 100) -> list[RequestRecord]:
        found = await self._recent.requests_by_client_id(client_request_id, limit=limit)

        async def search(index: ArchiveIndex) -> list[RequestRecord]:
            archived: list[RequestRecord] = []
            for file in reversed(index.of(LedgerKind.REQUESTS, _at(None))):
                last = sorted(archived, key=position_of)[-limit:]
                if len(last) < limit or file.last_at >= last[0].ended_at:
                    archived += await self._files.find(file, "client_request_id", [client_request_id])
            return archived

        by_id = {record.request_id: record for record in (*found, *await self._consistent(search))}
        return sorted(by_id.values(), key=position_of)[-limit:]

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        async def page_after(kind: LedgerKind, after: Position, count: int) -> list[Row]:
            return (await self._page(kind, after, where.until, count)).rows

        return await page_of_requests(page_after, where, limit, cursor)

    async def usage_chunks(self, where: UsageFilter) -> AsyncIterator[UsageChunk]:
        where = bounded(where)
        after, chosen = position_at("", where.since), list[ArchiveFile]()
        while files := (await self.index()).of(LedgerKind.REQUESTS, after.at, where.until):
            day = [file for file in files if file.day == files[0].day]
            end = (day[0].day + 1) * float(DAY_S)
            end = end if where.until is None else min(end, where.until)
            serial = self._index.serial
            recent = await self._recent.row_page(LedgerKind.REQUESTS, after, Position(end), count=MAX_PAGE)
            if recent.serial != serial:
                continue
            span = replace(where, since=None if after.at == -math.inf else after.at, until=end)
            if recent.more:  # being archived
                async for chunk in record_chunks(self, span):
                    yield chunk
            else:
                rows = await self._only_recent(day, recent.rows)
                yield RecordChunk([row for row in rows if matches(where, row)])
                chosen += day
            if len(chosen) >= _CHUNK_FILES:
                yield ArchivedChunk(self._files, chosen, where)
                chosen = []
            after = Position(end)
            if end == where.until:
                break
        if chosen:
            yield ArchivedChunk(self._files, chosen, where)
        if after.at == where.until:
            return
        if after.at > -math.inf:
            where = replace(where, since=after.at)
        async for chunk in record_chunks(self, where):
            yield chunk

    async def _only_recent(self, files: Sequence[ArchiveFile], rows: Sequence[Row]) -> list[RequestRecord]:
        """Return the requests of these rows that the files do not have."""
        requests = [row for row in rows if isinstance(row, RequestRecord)]
        known = set[str]()
        for file in files if requests else ():
            found = await self._files.find(file, "request_id", [row.request_id for row in requests])
            known |= {record.request_id for record in found}
        return [row for row in requests if row.request_id not in known]

    async def report(self, where: UsageFilter) -> list[UsageRow]:
        where = bounded(where)
        split = split_days(where.since, where.until)
        totals = await self._recent.day_sums(where, split)
        for since, until in split.edges:
            await add_chunks(totals, self.usage_chunks(replace(where, since=since, until=until)))
        return totals.rows()

    # --- intervals and lost calls

    async def add_interval(self, interval: InstanceInterval) -> bool:
        return await self._recent.add_interval(interval)

    async def intervals(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[InstanceInterval]:
        return await in_window(self.interval_pages(since=since, until=until), since, until)

    async def interval_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[InstanceInterval]]:
        if since is not None and until is not None and until <= since:
            return
        after, seen, serial = position_at("", since), 0, None
        while True:
            page = await self._page(LedgerKind.INTERVALS, after, until, INTERVALS_PAGE)
            if not page.rows:
                return
            yield [row for row in page.rows if isinstance(row, InstanceInterval)]
            after = position_of(page.rows[-1])
            if until is None:
                continue
            if after.at >= until + LONGEST_INTERVAL_S:
                return
            seen += sum(isinstance(one, InstanceInterval) and one.from_at < until for one in page.recent)
            serial = page.index.serial if serial is None else serial
            # Rows seen in Redis that were archived since are not counted there any more.
            recent_only = page.index.serial == serial and not page.index.of(
                LedgerKind.INTERVALS, after.at, until
            )
            if recent_only and await self._recent.count_intervals(since, until) <= seen:
                return

    async def add_lost_call(self, lost: LostCall) -> bool:
        return await self._recent.add_lost_call(lost)

    async def lost_calls(self, *, since: float | None = None, until: float | None = None) -> list[LostCall]:
        return [one async for page in self.lost_call_pages(since=since, until=until) for one in page]

    async def lost_call_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[LostCall]]:
        after = position_at("", since)
        while rows := (await self._page(LedgerKind.LOST, after, until, MAX_PAGE)).rows:
            page = [row for row in rows if isinstance(row, LostCall)]
            yield [lost for lost in page if until is None or lost.ended_at < until]
            after = position_of(page[-1])
            if until is not None and after.at >= until:
                return

    async def rates(self) -> list[PriceRate]:
        return await self._recent.rates()

    async def put_rate(self, rate: PriceRate) -> None:
        await self._recent.put_rate(rate)

    # --- both together

    async def _page(self, kind: LedgerKind, after: Position, until: float | None, count: int) -> _MergedPage:
        """Return the next rows behind a position; none at the end of the ledger."""

        async def read(index: ArchiveIndex) -> _MergedPage | None:
            files = index.of(kind, after.at, until)
            archived, upto = list[Row](), None
            if files:
                page = await self._files.page(files, after, until, count)
                archived, upto = page.rows, position_of(page.rows[-1]) if page.more else None
            recent = await self._recent.row_page(kind, after, upto, count=count)
            if recent.serial != index.serial:
                return None
            if archived and recent.more:
                archived = [row for row in archived if position_of(row) <= position_of(recent.rows[-1])]
            rows = merged(archived, recent.rows)
            return _MergedPage(rows=rows, recent=recent.rows, index=index)

        return await self._consistent(read)

    async def _consistent(self, read: Callable[[ArchiveIndex], Awaitable[T | None]]) -> T:
        """Return what was read with an index that was still current then, and of which all files exist."""
        while True:
            index = await self.index()
            try:
                found = await read(index)
            except (NotFound, StoreError):
                if (await self.index()).serial == index.serial:
                    raise
                continue
            if found is not None:
                return found


def _at(since: float | None) -> float:
    return -math.inf if since is None else since
