"""The archive's files in the blob store. All reads and writes run one at a time, in a thread of their own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from rdmacast.aio.threads import run_in_thread
from registry.accounting.row_order import LedgerKind, Position, Row
from registry.errors import StoreError
from registry.images.store import BlobStore
from registry.records.archive import ArchiveFile
from registry.records.usage import RequestRecord
from registry.redis.ledger_archive import RowNames
from registry.state import Tally, UsageFilter

if TYPE_CHECKING:
    from registry.archive.file_reader import FilePage, FileReader
    from registry.archive.writer import ArchiveWriter

_UPLOAD_BYTES = 1 << 20
_MAGIC = b"PAR1"
DURABLE_S = 1.5  # the append-only file is flushed every second

T = TypeVar("T")


class ArchiveFiles:
    """The files. pyarrow is loaded with the first of them that is used."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "archive")
        self._loaded: FileReader | None = None

    def __repr__(self) -> str:
        return f"<ArchiveFiles {self._store!r}>"

    @property
    def _reader(self) -> "FileReader":
        if self._loaded is None:
            from registry.archive.file_reader import FileReader  # pyarrow: 40 MB

            self._loaded = FileReader(self._store)
        return self._loaded

    async def page(
        self, files: Sequence[ArchiveFile], after: Position, until: float | None, count: int
    ) -> "FilePage":
        """Return about `count` rows of files of one kind, in order behind `after`. Raises NotFound."""
        return await self._run(lambda: self._reader.page(files, after, until, count))

    async def find(self, file: ArchiveFile, column: str, ids: Iterable[str]) -> list[RequestRecord]:
        """Return the requests that have one of these ids in a column. Raises NotFound."""
        return await self._run(lambda: self._reader.find(file, column, ids))

    async def known(self, files: Sequence[ArchiveFile], rows: Sequence[Row]) -> set[Position]:
        """Return the positions of those rows that the files have. Raises NotFound."""
        return await self._run(lambda: self._reader.known(files, rows))

    async def tally(
        self, files: Sequence[ArchiveFile], where: UsageFilter, by: Sequence[str], *, counts: bool = False
    ) -> AsyncIterator[list[Tally]]:
        """Yield sums of the requests that match. Raises NotFound."""
        sums: list[Any] = []
        for file in files:  # so that others' reads need not wait for all
            await self._run(partial(self._add_sums, sums, file, where, by, counts))
        if not sums:
            return

        def add_up() -> Iterator[list[Tally]]:
            from registry.archive.columns import regrouped, tallies  # pyarrow: 40 MB

            return tallies(regrouped(sums), by)

        found = await self._run(add_up)
        while (some := await self._run(lambda: next(found, None))) is not None:
            yield some

    def _add_sums(
        self, sums: list[Any], file: ArchiveFile, where: UsageFilter, by: Sequence[str], counts: bool
    ) -> None:
        self._reader.add_sums(sums, file, where, by, counts=counts)

    async def names(self, file: ArchiveFile, count: int) -> AsyncIterator[list[RowNames]]:
        """Yield the names of all rows in Redis, `count` at a time."""
        found = await self._run(lambda: self._reader.names(file, count))
        while (some := await self._run(lambda: next(found, None))) is not None:
            yield some

    @asynccontextmanager
    async def writing(self, kind: LedgerKind, day: int) -> AsyncIterator["FileDraft"]:
        """Open a draft of a new file on this machine; it is gone afterwards, whether it was stored or not."""
        with TemporaryDirectory(prefix="hypercast-archive-") as folder:
            draft = FileDraft(self, Path(folder) / "rows.parquet")
            await self._run(lambda: draft.open(kind, day))
            try:
                yield draft
            finally:
                await self._run(draft.discard)

    async def rewrite(self, file: ArchiveFile, change: Callable[[Any], Any]) -> ArchiveFile:
        """Store a file of the same rows, each table of them changed. Raises StoreError, CorruptImage."""
        async with self.writing(LedgerKind(file.kind), file.day) as draft:
            tables: Iterator[Any] = await self._run(lambda: self._reader.tables(file))
            while (table := await self._run(lambda: next(tables, None))) is not None:
                changed = await self._run(partial(change, table))
                await draft.add_table(changed, file.longest_s)
            return await draft.store()

    async def is_archive(self, digest: str) -> bool:
        """Return whether a blob is a Parquet file. Raises NotFound, StoreError."""

        def starts_so() -> bool:
            with closing(self._store.open_blob(digest)) as blob:
                magic = bytearray(min(len(_MAGIC), blob.size))
                blob.read_into(0, memoryview(magic))
            return magic == _MAGIC

        return await self._run(starts_so)

    async def delete(self, file: ArchiveFile) -> None:
        """Delete a file that no entry names any more, once Redis has surely written that to its disk."""
        await asyncio.sleep(DURABLE_S)
        await self._run(lambda: self._reader.clear())
        await self._store.delete(file.digest)

    async def upload(self, path: Path, file: ArchiveFile) -> None:
        """Store a file, and check it there. Raises StoreError, CorruptImage."""

        async def pieces() -> AsyncIterator[bytes]:
            with path.open("rb") as source:
                while piece := await run_in_thread(source.read, _UPLOAD_BYTES):
                    yield piece

        size = await self._store.append(file.digest, 0, pieces(), total=file.nbytes)
        if size != file.nbytes:
            raise StoreError(f"the store took {size} bytes of {file.nbytes}")
        await self._run(lambda: self._reader.check(file))

    async def aclose(self) -> None:
        """Close all files."""
        if self._loaded is not None:
            await self._run(self._loaded.clear)
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, work: Callable[[], T]) -> T:
        return await run_in_thread(work, executor=self._thread)

    in_thread = _run


class FileDraft:
    """A file that is being written."""

    def __init__(self, files: ArchiveFiles, path: Path) -> None:
        self._files = files
        self._path = path
        self._writer: ArchiveWriter | None = None
        self.rows = 0

    def open(self, kind: LedgerKind, day: int) -> None:
        """Open the file; blocks."""
        from registry.archive.writer import ArchiveWriter  # pyarrow: 40 MB

        self._writer = ArchiveWriter(kind, day, self._path)

    async def add(self, rows: Sequence[Row]) -> None:
        """Add rows in order. Raises InvalidRecord."""
        writer = self._writer
        assert writer is not None
        if rows:
            await self._files.in_thread(lambda: writer.add(rows))
        self.rows = writer.rows

    async def add_table(self, table: Any, longest_s: float) -> None:
        """Add a table of rows."""
        writer = self._writer
        assert writer is not None
        await self._files.in_thread(lambda: writer.add_table(table, longest_s))
        self.rows = writer.rows

    async def store(self) -> ArchiveFile:
        """Store the file, checked; return its entry. Raises StoreError, CorruptImage."""
        writer = self._writer
        assert writer is not None
        file = await self._files.in_thread(writer.close)
        await self._files.upload(self._path, file)
        return file

    def discard(self) -> None:
        """Close the file; blocks."""
        if self._writer is not None:
            self._writer.discard()
