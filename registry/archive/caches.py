"""Open files of the archive, decoded row groups and indexes by id, each bounded. For one thread at a time."""

import io
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from registry.accounting.row_order import LedgerKind
from registry.archive.columns import END
from registry.images.store import BlobReader, BlobStore
from registry.records.archive import ArchiveFile

MAX_OPEN_FILES = 8
MAX_GROUPS = 16
MAX_INDEXED_ROWS = 3_000_000  # 12 bytes each
BATCH_ROWS = 262_144

T = TypeVar("T")


class BlobFile(io.RawIOBase):
    """A blob as a file for pyarrow."""

    def __init__(self, reader: BlobReader) -> None:
        super().__init__()
        self._reader = reader
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(view), self._reader.size - self._at))
        self._reader.read_into(self._at, view[:nbytes])
        self._at += nbytes
        return nbytes

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()


@dataclass(frozen=True, slots=True)
class IdIndex:
    """The rows of a file by the hash of an id, sorted. Different ids may have one hash."""

    hashes: "np.ndarray[Any, Any]"
    rows: "np.ndarray[Any, Any]"

    def rows_of(self, ids: Iterable[str]) -> list[int]:
        """Return the rows that may have one of these ids."""
        wanted = np.fromiter(map(hash, ids), np.int64)
        low, high = (np.searchsorted(self.hashes, wanted, side) for side in ("left", "right"))
        return sorted(int(self.rows[at]) for lo, hi in zip(low, high, strict=True) for at in range(lo, hi))


class _Bounded(Generic[T]):
    """The values used last, up to a total weight."""

    def __init__(self, most: int, drop: Callable[[T], object] = lambda _: None) -> None:
        self._most = most
        self._drop = drop
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T], weight: int = 1) -> T:
        if key not in self._values:
            self._values[key] = make(), weight
        self._values.move_to_end(key)
        while len(self._values) > 1 and sum(one[1] for one in self._values.values()) > self._most:
            self._drop(self._values.popitem(last=False)[1][0])
        return self._values[key][0]

    def clear(self) -> None:
        while self._values:
            self._drop(self._values.popitem()[1][0])


class ArchiveCaches:
    """What has been read of the archive's files last."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._files: _Bounded[Any] = _Bounded(MAX_OPEN_FILES, lambda file: file.close(force=True))
        self._groups: _Bounded[Any] = _Bounded(MAX_GROUPS)
        self._indexes: _Bounded[IdIndex] = _Bounded(MAX_INDEXED_ROWS)

    def open(self, file: ArchiveFile) -> Any:
        """Return the Parquet file. Raises NotFound, StoreError."""
        return self._files.get(file.digest, lambda: self._open(file))

    def _open(self, file: ArchiveFile) -> Any:
        blob = pa.PythonFile(BlobFile(self._store.open_blob(file.digest)), mode="r")
        return parquet.ParquetFile(blob, pre_buffer=True)

    def group(self, file: ArchiveFile, number: int) -> Any:
        """Return a row group as a table."""
        return self._groups.get(
            (file.digest, number), lambda: self.open(file).read_row_group(number, use_threads=False)
        )

    def groups_from(self, file: ArchiveFile, at: float) -> Iterator[int]:
        """Yield the numbers of the row groups that have rows which end at `at` or later."""
        metadata = self.open(file).metadata
        column = self.open(file).schema_arrow.get_field_index(END[LedgerKind(file.kind)])
        for number in range(metadata.num_row_groups):
            if metadata.row_group(number).column(column).statistics.max >= at:
                yield number

    def batches(self, file: ArchiveFile, columns: Sequence[str]) -> Iterator[Any]:
        """Yield some columns in tables of bounded size."""
        batches = self.open(file).iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False)
        for batch in batches:
            yield pa.Table.from_batches([batch])

    def scan(self, file: ArchiveFile, column: str, ids: Iterable[str]) -> list[int]:
        """Return the rows that have one of a few ids."""
        found, first, wanted = list[int](), 0, pa.array(sorted(ids))
        for table in self.batches(file, [column]):
            here = np.flatnonzero(pc.is_in(table[column], value_set=wanted).to_numpy())
            found += [first + int(row) for row in here]
            first += table.num_rows
        return found

    def index(self, file: ArchiveFile, column: str) -> IdIndex:
        """Return the index by an id."""
        return self._indexes.get(
            (file.digest, column), lambda: self._make_index(file, column), weight=file.rows
        )

    def _make_index(self, file: ArchiveFile, column: str) -> IdIndex:
        hashes = np.empty(file.rows, np.int64)
        start = 0
        for table in self.batches(file, [column]):
            found = np.fromiter(map(hash, table[column].to_pylist()), np.int64, table.num_rows)
            hashes[start : start + len(found)] = found
            start += len(found)
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        return IdIndex(hashes[order], order)

    def clear(self) -> None:
        """Close all files."""
        for cache in (self._groups, self._indexes, self._files):
            cache.clear()
