"""Data on stdout, as a table, JSON or CSV."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.errors import UsageError
from cli.progress import human_bytes
from registry.tables import to_csv, to_parquet

FORMATS = ("table", "json", "csv")
REPORT_FORMATS = (*FORMATS, "parquet")

Row = Mapping[str, Any]


def render(rows: Sequence[Row], columns: Sequence[str], form: str) -> str:
    """`rows` with their `columns` (JSON keeps every field)."""
    if form == "json":
        return json.dumps([dict(row) for row in rows], indent=2, ensure_ascii=False) + "\n"
    if form == "csv":
        return to_csv([{column: cell(row.get(column)) for column in columns} for row in rows], columns)
    return table(rows, columns)


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Columns as wide as what is in them: a terminal may wrap a line, but nothing is cut off."""
    heads = [column.replace("_", " ") for column in columns]
    cells = [[shown(column, row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in [heads, *cells]) for index in range(len(columns))]
    numeric = [
        bool(rows) and all(isinstance(row.get(column), int | float) for row in rows) for column in columns
    ]
    lines = [heads, ["─" * width for width in widths], *cells]
    return "".join(
        "   ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def shown(column: str, value: object) -> str:
    """A value as people read it: sizes with a unit, times as UTC."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if column == "bytes" or column.endswith("_bytes"):
            return human_bytes(value)
        if column.endswith("_at") or column in ("since", "from", "to"):
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return cell(value)


def cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, list | tuple):
        return " ".join(cell(item) for item in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={cell(item)}" for key, item in value.items())
    return str(value)


def emit_report(rows: Sequence[Row], columns: Sequence[str], form: str, file: Path | None) -> None:
    """Rows to stdout or a file, as Parquet too. Raises UsageError for Parquet on a terminal."""
    if form == "parquet":
        if file is None and sys.stdout.isatty():
            raise UsageError("Parquet is binary: name a file with --file, or send the output to one")
        content = to_parquet(rows, columns)
    elif file is None:
        emit_rows(rows, columns, form)
        return
    else:
        content = render(rows, columns, form).encode()
    if file is not None:
        file.write_bytes(content)
    else:
        sys.stdout.buffer.write(content)
        sys.stdout.flush()


def emit_rows(rows: Sequence[Row], columns: Sequence[str], form: str) -> None:
    sys.stdout.write(render(rows, columns, form))
    sys.stdout.flush()


def emit_record(record: Row, form: str) -> None:
    """One record: a JSON object, one CSV row, or a table of field and value."""
    if form == "json":
        sys.stdout.write(json.dumps(dict(record), indent=2, ensure_ascii=False) + "\n")
    elif form == "csv":
        sys.stdout.write(render([record], list(record), "csv"))
    else:
        width = max(map(len, record), default=0)
        for name, value in record.items():
            sys.stdout.write(f"{name.replace('_', ' '):<{width}}  {shown(name, value)}".rstrip() + "\n")
    sys.stdout.flush()
