"""Tables that fit the terminal."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from cli.values import human_bytes, utc

Row = Mapping[str, Any]

GAP = "  "
ELLIPSIS = "…"
_COLOURS = {
    "green": {"active", "alive", "complete", "done", "exact", "ok", "ready", "succeeded"},
    "yellow": {
        "asleep",
        "cordoned",
        "not",
        "draining",
        "loading",
        "note",
        "open",
        "running",
        "source",
        "starting",
        "unsettled",
    },
    "red": {"bad", "cancelled", "dead", "expired", "failed", "gone", "lost", "revoked", "wrong"},
}
_COLOUR_OF = {word: colour for colour, words in _COLOURS.items() for word in words}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    `shown` makes the cell's text from its row (default: the field as people read it). On a narrow terminal
    columns with `drop` are left out, greatest first, then those with `shrink` are cut down to that width.
    """

    field: str
    heading: str = ""
    shown: Callable[[Row], str] | None = None
    numeric: bool = False
    wide: bool = False  # only with -o wide
    drop: int = 0
    shrink: int = 0
    state: bool = False  # coloured by its first word

    @property
    def title(self) -> str:
        return self.heading or self.field.replace("_", " ").upper()

    def text(self, row: Row) -> str:
        """Return the cell of this column in `row`."""
        text = self.shown(row) if self.shown is not None else human(self.field, row.get(self.field))
        return " ".join(text.split())


def terminal_width() -> int | None:
    """Return the number of characters in a line; None where output goes to a file or a pipe."""
    if not os.environ.get("COLUMNS", "").isdecimal() and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def colours_wanted() -> bool:
    """Return whether to colour stdout: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def coloured(text: str, word: str = "") -> str:
    """Return a state in its colour; `word` is the state where `text` says more."""
    first = (word or text).strip().split(" ")[0].strip(ELLIPSIS + ",:")
    return click.style(text, fg=_COLOUR_OF[first]) if first in _COLOUR_OF else text


def table(
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    width: int | None = None,
    wide: bool = False,
    colour: bool = False,
) -> str:
    """Return the rows as lines of at most `width` characters (None and `wide`: as wide as they are)."""
    used = [column for column in columns if wide or not column.wide]
    cells = {id(column): [column.text(row) for row in rows] for column in used}
    widths = {id(c): max([len(c.title), *map(len, cells[id(c)])]) for c in used}
    if width is not None and not wide:
        used = _fit(used, widths, width)
    lines = [_line([_cell(column.title, column, widths) for column in used])]
    if colour:
        lines[0] = click.style(lines[0], bold=True)
    for index in range(len(rows)):
        padded = [_cell(cells[id(column)][index], column, widths) for column in used]
        if colour:
            padded = [
                coloured(text) if column.state else text for text, column in zip(padded, used, strict=True)
            ]
        lines.append(_line(padded))
    return "".join(line + "\n" for line in lines)


def fields(pairs: Sequence[tuple[str, str]], *, width: int | None = None, colour: bool = False) -> str:
    """Return labelled values, one below the other; long ones go on below themselves, between words."""
    label_width = max((len(label) for label, _ in pairs), default=0) + 3
    lines = []
    for label, text in pairs:
        head = f"{label}:".ljust(label_width)
        parts = wrapped(text, None if width is None else max(20, width - label_width))
        if colour:
            head = click.style(head, bold=True)
            parts = [coloured(part) if label in ("State", "Status") else part for part in parts]
        lines += [((head if number == 0 else " " * label_width) + part) for number, part in enumerate(parts)]
    return "".join(line.rstrip() + "\n" for line in lines)


def human(field: str, value: object) -> str:
    """Return a value as people read it: sizes with a unit, times as UTC."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if field == "bytes" or field.endswith("_bytes"):
            return human_bytes(value)
        if is_moment(field):
            return utc(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, list | tuple):
        return ", ".join(human("", item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {human('', item)}" for key, item in value.items())
    return str(value)


def is_moment(field: str) -> bool:
    """Return whether a field of this name holds Unix seconds."""
    return field.endswith("_at") or field in ("since", "from", "to", "at")


def _fit(columns: Sequence[Column], widths: dict[int, int], width: int) -> list[Column]:
    """Return the columns that fit, and lower `widths` of those that are cut."""
    used = list(columns)

    def total(least: bool) -> int:
        sizes = [
            min(widths[id(c)], max(c.shrink, len(c.title))) if least and c.shrink else widths[id(c)]
            for c in used
        ]
        return sum(sizes) + len(GAP) * (len(sizes) - 1)

    while total(least=True) > width and any(column.drop for column in used):
        used.remove(max(used, key=lambda column: column.drop))
    while (excess := total(least=False) - width) > 0:
        cuttable = [c for c in used if c.shrink and widths[id(c)] > max(c.shrink, len(c.title))]
        if not cuttable:
            break
        widest = max(cuttable, key=lambda column: widths[id(column)])
        least = max(widest.shrink, len(widest.title))
        others = [widths[id(c)] for c in cuttable if c is not widest]
        target = max([least, widths[id(widest)] - excess, *[w - 1 for w in others]])
        widths[id(widest)] = min(widths[id(widest)] - 1, max(target, least))
    return used


def _cell(text: str, column: Column, widths: dict[int, int]) -> str:
    width = widths[id(column)]
    if len(text) > width:
        text = text[: width - 1] + ELLIPSIS
    return text.rjust(width) if column.numeric else text.ljust(width)


def _line(cells: Sequence[str]) -> str:
    return GAP.join(cells).rstrip()


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a text as lines of at most `width` characters, broken between words only."""
    if width is None or len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
