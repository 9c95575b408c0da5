"""How a benchmark ends: as asked for, by itself, or by a failure, with what it has measured until then."""

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_records

Rows = list[dict[str, Any]]


def end_politely() -> None:
    """Let SIGTERM end this program as Ctrl-C does: what it started would live on otherwise."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def keep_rows(
    name: str,
    measure: Callable[[Rows], None],
    failures: tuple[type[Exception], ...],
    *,
    json: Path | None,
    plot: Path | None,
    draw: Callable[[Sequence[dict[str, Any]], Path], None],
) -> None:
    """Let `measure` fill a list of records, and write and draw those that there are, also where it ends by
    one of `failures` or by Ctrl-C; these end the program with one line."""
    end_politely()
    rows: Rows = []
    failure, code = "", 1
    try:
        measure(rows)
    except failures as error:
        failure = str(error) or type(error).__name__
    except KeyboardInterrupt:
        failure, code = "interrupted", 130
    if json and rows:
        write_records(json, rows)
    if plot and rows:
        draw(rows, plot)
    if failure:
        print(f"{name}: {failure}", file=sys.stderr)
        sys.exit(code)
