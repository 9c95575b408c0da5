"""Exports: records in, pieces of a file out. Pure."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Protocol

from registry.codec import encode
from registry.exports import lago, openmeter
from registry.exports.charges import UNPRICED
from registry.exports.focus import COLUMNS, PROVIDER, FocusRow, FocusRows, columns_of
from registry.records.usage import PriceRate, RequestRecord

_PIECE_ROWS = 50


class ExportFormat(StrEnum):
    """What records are exported as."""

    FOCUS = "focus"  # CSV
    OPENMETER = "openmeter"  # a JSON object a line
    LAGO = "lago"  # a JSON object a line


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportContext:
    """What an export needs beside the records.

    `currency` is that of records without a rate, `source` the cluster's name (a URI) in events, `provider`
    the platform's operator, `key_names` the names of keys by id.
    """

    rates: Sequence[PriceRate]
    currency: str
    source: str
    provider: str = PROVIDER
    key_names: Mapping[str, str]


class Exporter(Protocol):
    """A file in the making. Feed it all records once, in order of `ended_at`, then end it.

    Each piece is of few rows, so that its caller may do something else before it takes the next.
    """

    def head(self) -> bytes:
        """Return what precedes the first row."""
        ...

    def add(self, records: Sequence[RequestRecord]) -> Iterator[bytes]:
        """Add records; yield what can be written by now. Raises InvalidRecord."""
        ...

    def end(self) -> Iterator[bytes]:
        """Yield the rest."""
        ...


def make_exporter(form: ExportFormat, context: ExportContext) -> Exporter:
    """Return the exporter of a format."""
    rates = {rate.id: rate for rate in context.rates}
    unpriced = replace(UNPRICED, currency=context.currency)
    match form:
        case ExportFormat.FOCUS:
            return _FocusCsv(
                FocusRows(
                    rates=rates,
                    unpriced=unpriced,
                    key_names=context.key_names,
                    provider=context.provider,
                )
            )
        case ExportFormat.OPENMETER:
            return _OpenMeterLines(rates, unpriced, context.source)
        case ExportFormat.LAGO:
            return _LagoLines(rates, unpriced)


class _FocusCsv:
    def __init__(self, rows: FocusRows) -> None:
        self._rows = rows

    def head(self) -> bytes:
        return _csv_lines([list(COLUMNS)])

    def add(self, records: Sequence[RequestRecord]) -> Iterator[bytes]:
        for record in records:
            yield from _pieces(self._rows.add(record))

    def end(self) -> Iterator[bytes]:
        yield from _pieces(self._rows.end())


@dataclass(frozen=True, slots=True)
class _OpenMeterLines:
    rates: Mapping[str, PriceRate]
    unpriced: PriceRate
    source: str

    def head(self) -> bytes:
        return b""

    def add(self, records: Sequence[RequestRecord]) -> Iterator[bytes]:
        for some in _batches(iter(records)):
            events = (
                openmeter.event_of(record, self.rates.get(record.rate_id, self.unpriced), self.source)
                for record in some
            )
            yield b"".join(encode(event) + b"\n" for event in events)

    def end(self) -> Iterator[bytes]:
        yield from ()


@dataclass(frozen=True, slots=True)
class _LagoLines:
    rates: Mapping[str, PriceRate]
    unpriced: PriceRate

    def head(self) -> bytes:
        return b""

    def add(self, records: Sequence[RequestRecord]) -> Iterator[bytes]:
        for some in _batches(iter(records)):
            yield b"".join(
                encode(event) + b"\n"
                for record in some
                for event in lago.events_of(record, self.rates.get(record.rate_id, self.unpriced))
            )

    def end(self) -> Iterator[bytes]:
        yield from ()


def _pieces(rows: Iterator[FocusRow]) -> Iterator[bytes]:
    while some := list(islice(rows, _PIECE_ROWS)):
        yield _csv_lines([columns_of(row) for row in some])


def _batches(records: Iterator[RequestRecord]) -> Iterator[list[RequestRecord]]:
    while some := list(islice(records, _PIECE_ROWS)):
        yield some


def _csv_lines(lines: Sequence[Sequence[str]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue().encode()
