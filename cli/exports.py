"""Exports as files: lines as they arrive from the gateway, or Parquet of them, in bounded memory."""

import csv
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import IO, Any

from cli.errors import UsageError
from registry.exports.decimals import NANO_DIGITS, nanos_of
from registry.exports.focus import COLUMNS, QUANTITY_DIGITS, Kind

_BATCH_ROWS = 4096


@dataclass(slots=True)
class ExportTotals:
    """What an export has."""

    rows: int = 0
    cost_nanos: int = 0
    currency: str = ""


@contextmanager
def export_target(file: Path | None, *, binary: bool) -> Iterator[IO[bytes]]:
    """Yield where to write. A file is there once the block has ended well, else there is none, or the former.

    Raises UsageError for a binary format on a terminal.
    """
    if file is not None:
        part = file.with_name(f".{file.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as out:
                yield out
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    elif not binary:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif sys.stdout.isatty():
        raise UsageError("Parquet is binary: name a file with --file, or redirect stdout")
    else:
        with tempfile.TemporaryFile() as whole:  # its writer wants to know where it is, which a pipe does not
            yield whole
            whole.seek(0)
            shutil.copyfileobj(whole, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def write_lines(lines: Iterable[str], out: IO[bytes]) -> ExportTotals:
    """Write events, one a line."""
    totals = ExportTotals()
    for _ in _teed(lines, out):
        totals.rows += 1
    return totals


def write_csv(lines: Iterable[str], out: IO[bytes]) -> ExportTotals:
    """Write FOCUS rows as CSV."""
    totals = ExportTotals()
    for row in csv.DictReader(_teed(lines, out)):
        _add(totals, row)
    return totals


def write_parquet(lines: Iterable[str], out: IO[bytes]) -> ExportTotals:
    """Write FOCUS rows as Parquet, with decimals and UTC timestamps."""
    import pyarrow  # 40 MB of memory
    from pyarrow import parquet

    types = {
        Kind.TEXT: pyarrow.string(),
        Kind.MOMENT: pyarrow.timestamp("us", tz="UTC"),
        Kind.MONEY: pyarrow.decimal128(28, NANO_DIGITS),
        Kind.QUANTITY: pyarrow.decimal128(36, QUANTITY_DIGITS),
        Kind.COUNT: pyarrow.int64(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    totals, rows = ExportTotals(), csv.DictReader(lines)
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        while some := list(islice(rows, _BATCH_ROWS)):
            for row in some:
                _add(totals, row)
            writer.write_table(pyarrow.table(_columns(some), schema=schema))
    return totals


def _columns(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Any]]:
    return {name: [_value(kind, row[name]) for row in rows] for name, kind in COLUMNS.items()}


def _value(kind: Kind, text: str) -> object:
    if not text:
        return None
    match kind:
        case Kind.TEXT:
            return text
        case Kind.MOMENT:
            return datetime.fromisoformat(text)
        case Kind.MONEY | Kind.QUANTITY:
            return Decimal(text)
        case Kind.COUNT:
            return int(text)


def _teed(lines: Iterable[str], out: IO[bytes]) -> Iterator[str]:
    for line in lines:
        out.write(line.encode() + b"\n")
        yield line


def _add(totals: ExportTotals, row: Mapping[str, str]) -> None:
    totals.rows += 1
    totals.cost_nanos += nanos_of(row["BilledCost"])
    totals.currency = row["BillingCurrency"]
