"""Data on stdout, as a table, JSON or CSV."""

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

FORMATS = ("table", "json", "csv")

Row = Mapping[str, Any]


def render(rows: Sequence[Row], columns: Sequence[str], form: str) -> str:
    """`rows` with their `columns` (JSON keeps every field)."""
    if form == "json":
        return json.dumps([dict(row) for row in rows], indent=2, ensure_ascii=False) + "\n"
    if form == "csv":
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([cell(row.get(column)) for column in columns] for row in rows)
        return out.getvalue()
    return table(rows, columns)


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        numeric = bool(rows) and all(isinstance(row.get(column), int | float) for row in rows)
        grid.add_column(column.replace("_", " "), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(cell(row.get(column)) for column in columns))
    out = io.StringIO()
    # Piped output is never cut to a terminal's width.
    Console(file=out, width=None if sys.stdout.isatty() else 400, highlight=False, markup=False).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


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
            sys.stdout.write(f"{name.replace('_', ' '):<{width}}  {cell(value)}\n")
    sys.stdout.flush()
