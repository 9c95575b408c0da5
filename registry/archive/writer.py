"""One Parquet file of the archive, as it is written on this machine. All of it blocks: use a thread."""

import hashlib
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyarrow import parquet

from registry.accounting.row_order import LedgerKind, Row
from registry.archive.columns import END, integer_sums, part_counts, schema_of, table_of
from registry.records.archive import ArchiveFile
from registry.records.usage import InstanceInterval

# A row group is what a reader decodes at once.
GROUP_ROWS = 8192
GROUP_PARTS = 65_536
_MODULUS = 1 << 64
# Columns with a value of its own in each row: a dictionary of them would only take space.
_UNIQUE = frozenset({"request_id", "id", "client_request_id", "call_id"})


class ArchiveWriter:
    """A file of rows of one kind and day; they are added in order."""

    def __init__(self, kind: LedgerKind, day: int, path: Path) -> None:
        self._kind = kind
        self._day = day
        self._path = path
        schema = schema_of(kind)
        # So that no two files are the same: one may replace another, of which the blob is then deleted.
        schema = schema.with_metadata({"attempt": uuid.uuid4().hex, "kind": kind.value, "day": str(day)})
        texts = [field.name for field in schema if str(field.type) == "string"]
        self._file = parquet.ParquetWriter(
            path,
            schema,
            compression="zstd",
            use_dictionary=[name for name in texts if name not in _UNIQUE] or False,
            write_statistics=[END[kind]],
        )
        self._sums: Counter[str] = Counter()
        self._first_at = 0.0
        self._last_at = self._longest_s = 0.0
        self.rows = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows as one row group, or several where they have many parts. Raises InvalidRecord."""
        if self._kind is LedgerKind.INTERVALS:
            lengths = (one.to_at - one.from_at for one in rows if isinstance(one, InstanceInterval))
            self._longest_s = max(self._longest_s, *lengths)
        self.add_table(table_of(self._kind, rows))

    def add_table(self, table: Any, longest_s: float = 0.0) -> None:
        """Add rows that are a table already."""
        ends = table[END[self._kind]]
        if not self.rows:
            self._first_at = ends[0].as_py()
        self._last_at, self._longest_s = ends[-1].as_py(), max(self._longest_s, longest_s)
        self.rows += table.num_rows
        self._sums.update(integer_sums(table))
        counts, start = part_counts(self._kind, table).cumsum(), 0
        while start < table.num_rows:
            before = counts[start - 1] if start else 0
            upto = int(counts.searchsorted(before + GROUP_PARTS, "right"))
            rows = min(max(upto - start, 1), GROUP_ROWS, table.num_rows - start)
            self._file.write_table(table.slice(start, rows), row_group_size=rows)
            start += rows

    def close(self) -> ArchiveFile:
        """Finish the file; return its entry."""
        self._file.close()
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ArchiveFile(
            digest=digest,
            kind=self._kind.value,
            day=self._day,
            rows=self.rows,
            nbytes=self._path.stat().st_size,
            first_at=self._first_at,
            last_at=self._last_at,
            longest_s=self._longest_s,
            sums={name: total % _MODULUS for name, total in sorted(self._sums.items())},
        )

    def discard(self) -> None:
        """Close a file that is not needed. Idempotent."""
        self._file.close()
