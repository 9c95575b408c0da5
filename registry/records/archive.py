"""The index of the ledger's archive: one entry for each Parquet file. Immutable."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """Rows of one kind that end on one UTC day, in order, as a Parquet file in the blob store.

    `digest` is the blob's SHA-256. The rows end in `[first_at, last_at]` and last at most `longest_s` (0 but
    for intervals). `sums` has the sum of each integer column, modulo 2**64.
    """

    digest: str
    kind: str
    day: int
    rows: int
    nbytes: int
    first_at: float
    last_at: float
    longest_s: float
    sums: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveIndex:
    """All files, by day and first row, as of the change `serial`."""

    serial: int = 0
    closed: float = float("-inf")
    files: tuple[ArchiveFile, ...] = ()

    def of(self, kind: str, since: float, until: float | None = None) -> list[ArchiveFile]:
        """Return the files that have rows with a moment in `[since, until)`."""
        return [
            file
            for file in self.files
            if file.kind == kind
            and file.last_at >= since
            # One second for rounding.
            and (until is None or file.first_at - file.longest_s - bool(file.longest_s) < until)
        ]
