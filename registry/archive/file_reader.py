"""Reads of the archive's files: pages by position, rows by id, sums. All of it blocks: use a thread."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow.compute as pc

from registry.accounting.row_order import LedgerKind, Position, Row, merged, position_of
from registry.archive.caches import ArchiveCaches
from registry.archive.columns import (
    END,
    grouped,
    integer_sums,
    matching,
    names_columns,
    part_counts,
    regrouped,
    rows_of,
    tally_columns,
)
from registry.codec import encode
from registry.errors import CorruptImage
from registry.images.store import BlobStore
from registry.keys import client_request
from registry.records.archive import ArchiveFile
from registry.records.usage import RequestRecord
from registry.redis.ledger_archive import RowNames
from registry.state import UsageFilter

PAGE_PARTS = 2000  # limit of the parts of a page's rows, except the last
_SLICE = 128
MERGED_ROWS = 500_000  # of tables of sums
SCANNED_IDS = 8  # so few are not worth an index
_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class FilePage:
    """Rows in order; `more` rows of these files follow."""

    rows: list[Row]
    more: bool


class FileReader:
    """A reader with caches. For one thread at a time."""

    def __init__(self, store: BlobStore) -> None:
        self._caches = ArchiveCaches(store)

    def page(
        self, files: Sequence[ArchiveFile], after: Position, until: float | None, count: int
    ) -> FilePage:
        """Return about `count` rows of files of one kind, in order behind `after`.

        Those that cannot have a moment before `until` are left out.
        """
        found: list[Row] = []
        for _, parts in groupby(files, key=lambda file: file.day):
            pages = [self._rows_after(file, after, until, count - len(found)) for file in parts]
            rows: list[Row] = []
            for page in pages:
                rows = merged(rows, page.rows)
            ends = [position_of(page.rows[-1]) for page in pages if page.more]
            if ends:
                found += [row for row in rows if position_of(row) <= min(ends)]
                return FilePage(found, more=True)
            found += rows
            if len(found) >= count:
                return FilePage(found, more=True)
        return FilePage(found, more=False)

    def _rows_after(self, file: ArchiveFile, after: Position, until: float | None, count: int) -> FilePage:
        kind, found, parts = LedgerKind(file.kind), list[Row](), 0
        bound = float("inf") if until is None else until + file.longest_s + bool(file.longest_s)
        for number in self._caches.groups_from(file, after.at):
            table = self._caches.group(file, number)
            ends = table[END[kind]].to_numpy()
            stop = int(np.searchsorted(ends, bound, "left"))
            counts = part_counts(kind, table)
            start = int(np.searchsorted(ends, after.at, "left"))
            while start < stop:
                if len(found) >= count or (found and parts >= PAGE_PARTS):
                    return FilePage(found[:count], more=True)
                few = max(1, int(np.searchsorted(counts[start : start + _SLICE].cumsum(), PAGE_PARTS)))
                rows = rows_of(kind, table.slice(start, min(few, stop - start)))
                found += [row for row in rows if position_of(row) > after]
                parts += int(counts[start : start + len(rows)].sum())
                start += len(rows)
            if stop < table.num_rows:
                break
        return FilePage(found[:count], more=True) if len(found) > count else FilePage(found, more=False)

    def find(self, file: ArchiveFile, column: str, ids: Iterable[str]) -> list[RequestRecord]:
        """Return the requests that have one of these ids in a column."""
        wanted = set(ids)
        if len(wanted) <= SCANNED_IDS:
            rows = self._caches.scan(file, column, wanted)
        else:
            rows = self._caches.index(file, column).rows_of(wanted)
        found: list[RequestRecord] = []
        first = 0
        metadata = self._caches.open(file).metadata
        for number in range(metadata.num_row_groups if rows else 0):
            size = metadata.row_group(number).num_rows
            here = [row - first for row in rows if first <= row < first + size]
            first += size
            if here:
                table = self._caches.group(file, number).take(here)
                found += [
                    row
                    for row in rows_of(LedgerKind.REQUESTS, table)
                    if isinstance(row, RequestRecord) and getattr(row, column) in wanted
                ]
        return found

    def known(self, files: Sequence[ArchiveFile], rows: Sequence[Row]) -> set[Position]:
        """Return the positions of these rows, sorted and of one day, that the files have."""
        if not (files and rows):
            return set()
        wanted = {position_of(row) for row in rows}
        found: set[Position] = set()
        for file in files:
            for table in self._caches.batches(file, sorted({END[LedgerKind(file.kind)], *self._named(file)})):
                ends = table[END[LedgerKind(file.kind)]]
                low, high = (min(wanted).at, max(wanted).at)
                inside = table.filter(pc.and_(pc.greater_equal(ends, low), pc.less_equal(ends, high)))
                if inside.num_rows:
                    at = inside[END[LedgerKind(file.kind)]].to_pylist()
                    names = _names(LedgerKind(file.kind), inside)
                    found |= wanted & {
                        Position(end, name.member) for end, name in zip(at, names, strict=True)
                    }
        return found

    def names(self, file: ArchiveFile, count: int) -> Iterator[list[RowNames]]:
        """Yield the names of all rows in Redis, `count` at a time."""
        for table in self._caches.batches(file, self._named(file)):
            for start in range(0, table.num_rows, count):
                yield _names(LedgerKind(file.kind), table.slice(start, count))

    @staticmethod
    def _named(file: ArchiveFile) -> list[str]:
        return names_columns(LedgerKind(file.kind))

    def add_sums(
        self, sums: list[Any], file: ArchiveFile, where: UsageFilter, by: Sequence[str], *, counts: bool
    ) -> None:
        """Add tables of sums of the requests that match to `sums`, merged where they are large."""
        for table in self._caches.batches(file, tally_columns(by, counts=counts)):
            rows = matching(table, where)
            if rows.num_rows:
                sums.append(grouped(rows, by, counts=counts))
        if len(sums) > 1 and sum(table.num_rows for table in sums) > MERGED_ROWS:
            sums[:] = [regrouped(sums)]

    def check(self, file: ArchiveFile) -> None:
        """Compare the stored file with its entry. Raises CorruptImage."""
        rows, sums = 0, dict.fromkeys(file.sums, 0)
        last: float | None = None
        for table in self._caches.batches(file, sorted({*file.sums, END[LedgerKind(file.kind)]})):
            ends = table[END[LedgerKind(file.kind)]].to_numpy()
            ordered = (last is None or last <= ends[0]) and bool((ends[1:] >= ends[:-1]).all())
            last = float(ends[-1]) if ordered else float("nan")
            rows += table.num_rows
            for name, total in integer_sums(table).items():
                sums[name] = (sums[name] + total) % _MODULUS
        if (rows, sums, last) != (file.rows, file.sums, file.last_at):
            raise CorruptImage(f"the archive's file {file.digest} does not hold the rows that were written")

    def tables(self, file: ArchiveFile) -> Iterator[Any]:
        """Yield all rows, a row group at a time."""
        for number in range(self._caches.open(file).metadata.num_row_groups):
            yield self._caches.open(file).read_row_group(number, use_threads=False)

    def clear(self) -> None:
        """Close all files."""
        self._caches.clear()


def _names(kind: LedgerKind, table: Any) -> list[RowNames]:
    columns = [table[name].to_pylist() for name in names_columns(kind)]
    if kind is LedgerKind.LOST:
        return [RowNames(name) for (name,) in zip(*columns, strict=True)]
    if kind is LedgerKind.INTERVALS:
        return [RowNames(encode(identity).decode()) for identity in zip(*columns, strict=True)]
    return [
        RowNames(name, client_request(client, end, name) if client else "")
        for name, client, end in zip(*columns, strict=True)
    ]
