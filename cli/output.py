"""Data on stdout: tables for people, JSON and CSV for programs.

JSON and CSV have the same fields and values: numbers without units, times in ISO 8601 (UTC). In CSV a field
of a field has a name with a dot, as `scaling.min_instances`, the items of a list are joined by `;`, and
lists of objects are JSON.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cli.errors import UsageError
from cli.tables import Column, Row, colours_wanted, fields, human, is_moment, table, terminal_width
from cli.values import utc_ms
from registry.accounting.tables import to_csv, to_parquet

FORMATS = ("table", "wide", "json", "csv")
REPORT_FORMATS = (*FORMATS, "parquet")


def render(rows: Sequence[Row], columns: Sequence[Column], names: Sequence[str], form: str) -> str:
    """Return rows in a form: tables have `columns`, CSV the fields `names`, JSON every field."""
    if form == "json":
        return json.dumps([portable(row) for row in rows], indent=2, ensure_ascii=False) + "\n"
    if form == "csv":
        return to_csv([csv_row(row, names) for row in rows], names)
    return table(rows, columns, width=terminal_width(), wide=form == "wide", colour=colours_wanted())


def emit_rows(rows: Sequence[Row], columns: Sequence[Column], names: Sequence[str], form: str) -> None:
    """Write rows to stdout."""
    write(render(rows, columns, names, form))


def emit_record(
    record: Row, form: str, shown: Sequence[tuple[str, str]] | None = None, *, as_is: bool = False
) -> None:
    """Write one record: a JSON object, one CSV row, or labelled values (`shown`, by default every field).

    With `as_is` times stay Unix seconds in JSON and CSV.
    """
    record = record if as_is or form not in ("json", "csv") else portable(record)
    if form == "json":
        write(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    elif form == "csv":
        flat = flattened(record)
        write(to_csv([{name: _csv_cell(value) for name, value in flat.items()}], list(flat)))
    else:
        write_fields(labelled(record) if shown is None else shown)


def write_fields(shown: Sequence[tuple[str, str]]) -> None:
    """Write labelled values to stdout."""
    write(fields(shown, width=terminal_width(), colour=colours_wanted()))


def emit_report(
    rows: Sequence[Row], columns: Sequence[Column], names: Sequence[str], form: str, file: Path | None
) -> None:
    """Write rows to stdout or a file, as Parquet too. Raises UsageError for Parquet on a terminal."""
    if form == "parquet":
        if file is None and sys.stdout.isatty():
            raise UsageError("Parquet is binary: name a file with --file, or redirect stdout")
        content = to_parquet(rows, names)
    elif file is None:
        emit_rows(rows, columns, names, form)
        return
    elif form in ("json", "csv"):
        content = render(rows, columns, names, form).encode()
    else:
        content = table(rows, columns, wide=form == "wide").encode()
    if file is not None:
        file.write_bytes(content)
    else:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()


def write(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def labelled(record: Row) -> list[tuple[str, str]]:
    """Return every field with a label made of its name."""
    return [
        (name.replace("_", " ").capitalize().replace("gpu", "GPU"), human(name, value))
        for name, value in record.items()
    ]


def portable(record: Row) -> dict[str, Any]:
    """Return a record for programs: times in ISO 8601."""
    return {name: _portable(name, value) for name, value in record.items()}


def _portable(name: str, value: object) -> object:
    if isinstance(value, Mapping):
        return portable(value)
    if isinstance(value, list | tuple):
        return [_portable("", item) for item in value]
    if is_moment(name) and isinstance(value, int | float) and not isinstance(value, bool):
        return utc_ms(value)
    return value


def csv_row(row: Row, names: Sequence[str]) -> dict[str, object]:
    """Return the cells of the fields `names`."""
    return {name: _csv_cell(_portable(name.rpartition(".")[2], _field(row, name))) for name in names}


def _field(row: Row, name: str) -> object:
    """Return a field, or the field of a field that `name` names with a dot."""
    outer, dot, inner = name.partition(".")
    if name in row or not dot:
        return row.get(name)
    nested = row.get(outer)
    return _field(nested, inner) if isinstance(nested, Mapping) else None


def _csv_cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ";".join(str(item) for item in value)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return value


def flattened(record: Row, prefix: str = "") -> dict[str, Any]:
    """Return a record without nested objects: `scaling.min_instances` for a field of a field."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
