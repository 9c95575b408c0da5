"""Moves closed days of the ledger from Redis to the archive."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from registry.accounting.row_order import START, LedgerKind, Position, Row, position_of
from registry.accounting.usage_report import day_of
from registry.archive.files import ArchiveFiles, FileDraft
from registry.archive.lease import archive_lease
from registry.clock import Clock
from registry.errors import InvalidRecord
from registry.held_lease import HeldLease
from registry.records.archive import ArchiveFile
from registry.records.quota import DAY_S
from registry.redis.ledger_archive import names_of
from registry.redis.state import RedisState

# A day is closed this long after its end: hardly any record is written later.
CLOSED_AFTER_S = 3600.0
# Rows of one file, which has a draft on this machine.
FILE_ROWS = 500_000
REMOVED_AT_ONCE = 500
PAGE = 1000
_ROWS_A_GROUP = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveProgress:
    """How far the archiver is: rows moved of all that are due; `file` is the one just published."""

    kind: LedgerKind
    day: int
    moved: int
    total: int
    file: ArchiveFile | None = None


def last_close(now: float) -> float:
    """Return the end of the last UTC day that is closed."""
    return day_of(now - CLOSED_AFTER_S) * float(DAY_S)


class LedgerArchiver:
    """The writer of the archive; one at a time in the cluster."""

    def __init__(self, state: RedisState, files: ArchiveFiles, clock: Clock) -> None:
        self._state = state
        self._files = files
        self._clock = clock

    def __repr__(self) -> str:
        return f"<LedgerArchiver {self._files!r}>"

    async def due_since(self) -> float | None:
        """Return when (Unix seconds) the oldest day whose rows could be archived closed, None without any."""
        before = Position(last_close(self._clock.wall_s()))
        pages = [await self._state.row_page(kind, START, before, count=1) for kind in LedgerKind]
        days = [day_of(position_of(row).at) for page in pages for row in page.rows]
        return (min(days) + 1) * float(DAY_S) + CLOSED_AFTER_S if days else None

    async def archive(self, before: float | None = None) -> AsyncGenerator[ArchiveProgress, None]:
        """Move all days that ended by `before` (by default all that are closed); yield progress.

        Raises InvalidRecord for days that are not closed, Conflict where another process archives,
        StaleEpoch where it lost the lease, StoreError and CorruptImage. It may be repeated then.
        """
        closed = last_close(self._clock.wall_s())
        before = closed if before is None else day_of(before) * float(DAY_S)
        if before > closed:
            raise InvalidRecord(f"only closed days can be archived: before {closed:.0f} at the latest")
        async with archive_lease(self._state, self._clock) as lease:
            await self._state.close_requests(lease.epoch, before)
            total = sum([await self._state.count_rows(kind, before) for kind in LedgerKind])
            moved = 0
            for kind in LedgerKind:
                while first := (await self._state.row_page(kind, START, Position(before), count=1)).rows:
                    day = day_of(position_of(first[0]).at)
                    yield ArchiveProgress(kind=kind, day=day, moved=moved, total=total)
                    job = _DayMove(self._state, self._files, lease, kind, day)
                    async for rows, file in job.run():
                        moved += rows
                        yield ArchiveProgress(kind=kind, day=day, moved=moved, total=total, file=file)


class _DayMove:
    """The move of one kind of rows of one day, or of the first FILE_ROWS of them."""

    def __init__(
        self, state: RedisState, files: ArchiveFiles, lease: HeldLease, kind: LedgerKind, day: int
    ) -> None:
        self._state = state
        self._files = files
        self._lease = lease
        self._kind = kind
        self._day = day
        self._stored: Sequence[ArchiveFile] = ()

    async def run(self) -> AsyncGenerator[tuple[int, ArchiveFile | None], None]:
        """Yield numbers of rows that left Redis, and the published file."""
        index = await self._state.archive_index()
        self._stored = [file for file in index.files if (file.kind, file.day) == (self._kind, self._day)]
        async with self._files.writing(self._kind, self._day) as draft:
            dropped = await self._fill(draft)
            if dropped:
                yield dropped, None
            if not draft.rows:
                return
            file = await draft.store()
        await self._lease.renew()
        await self._state.publish_file(self._lease.epoch, file)
        yield 0, file
        async for names in self._files.names(file, REMOVED_AT_ONCE):
            await self._lease.renew()
            await self._state.remove_rows(self._lease.epoch, self._kind, names, digest=file.digest)
            yield len(names), None

    async def _fill(self, draft: FileDraft) -> int:
        """Write the rows that no file has yet; remove those that a killed archiver left, and count them."""
        after, end, dropped = START, Position((self._day + 1) * float(DAY_S)), 0
        group: list[Row] = []
        more = True
        while more and draft.rows + len(group) < FILE_ROWS:
            await self._lease.renew()
            page = await self._state.row_page(self._kind, after, end, count=PAGE)
            more = page.more
            if not page.rows:
                break
            after = position_of(page.rows[-1])
            known: set[Position] = set()
            for file in self._stored:
                here = await self._files.known([file], page.rows) - known
                known |= here
                dropped += await self._remove(file, [row for row in page.rows if position_of(row) in here])
            group += [row for row in page.rows if position_of(row) not in known]
            if len(group) >= _ROWS_A_GROUP:
                await draft.add(group)
                group = []
        await draft.add(group)
        return dropped

    async def _remove(self, file: ArchiveFile, rows: Sequence[Row]) -> int:
        names = [names_of(row) for row in rows]
        for start in range(0, len(names), REMOVED_AT_ONCE):
            some = names[start : start + REMOVED_AT_ONCE]
            await self._state.remove_rows(self._lease.epoch, self._kind, some, digest=file.digest)
        return len(names)
