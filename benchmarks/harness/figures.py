"""Figures in Markdown that come from result files: inline figures and tables, rendered from their markers.

An inline figure is a number, an optional unit and an HTML comment, which Markdown does not show:

    P90 is 0.309 s<!-- figure: scaleout-13b-k4-host-2026-11-23.json hypercast.ttft_p90_s .3f -->

The comment names a file of benchmarks/results (or a short name for it, see below), an expression and a
Python format. An expression has one or more operands (paths or numbers) with `+ - * /` between them,
evaluated from left to right. A path is the name of a record (none for the first one: `.median_s`), filters
on its fields or `params` if several records have that name (`hypercast[batch=8,mode=alone]`), and fields or
list indices; a name with spaces is quoted: `"all on".median_s`. It may end with a reduction (count, min,
max, sum, median, mean), and `*` stands for every element of a list: `.switches.*.context.min`. A later path
may name another file: `FILE:PATH`. A record that does not count (`counts` is false) is only found with the
filter `[counts=False]`.

A document can give its files short names, so that a newer run needs one change:

    <!-- results
    k4: scaleout-13b-k4-host-2026-11-23.json
    conv: conv-1.json conv-2.json conv-3.json
    -->

A figure of several files, which are repeats of one run, is the median of the files' values; a reduction
before the name gives another: `min conv hypercast.gpu_s`. A file in which a record is missing or does not
count is left out, unless that leaves none.

A table lies between two comments; everything between them is generated:

    <!-- table
    title: P90 of times to first token
    value: ttft_p90_s .3f s
    relative: hypercast .2f
    column: k = 1: scaleout-13b-k1-host-2026-11-23.json
    row: ours: hypercast
    row: binary tree: faasnet
    -->
    <!-- /table -->

`value` has a field, a format and a unit; `relative` appends each cell's ratio to that record's, in brackets.
A column is a file (with filters, if needed), a row a record of it; a cell without a record stays empty. In a
column of several files a cell is the median, with the least and the greatest value if these differ.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.result_files import FigureError, ResultFiles, split_filters

_FIGURE = re.compile(
    r"(?P<value>-?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?%?)(?P<unit>[^\d<>|\n]{0,30})"
    r"<!-- figure: (?P<spec>[^>\n]+?) -->"
)
_FIGURE_MARK = re.compile(r"<!-- figure:")
_TABLE = re.compile(r"<!-- table\n(?P<spec>.*?)\n-->\n(?P<body>.*?)<!-- /table -->", re.DOTALL)
_TABLE_MARK = re.compile(r"<!-- table\b")
_RESULTS = re.compile(r"<!-- results\n(?P<names>.*?)\n-->", re.DOTALL)
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A figure or table in a document that differs from its result file, or a marker that is wrong."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def formatted(value: Any, spec: str) -> str:
    """Format a value. Raises FigureError."""
    try:
        return format(value, spec)
    except (TypeError, ValueError) as error:
        raise FigureError(f"cannot format {value!r} as {spec!r}: {error}") from error


def render(text: str, path: Path, results: ResultFiles) -> tuple[str, list[Difference], list[Difference]]:
    """Return the document with current figures, the differences, and the markers that are wrong."""
    changed: list[Difference] = []
    failed: list[Difference] = []
    code = _code_spans(text)
    results.short_names = _short_names(text, code)
    pieces, done = [], 0
    for match in sorted([*_FIGURE.finditer(text), *_TABLE.finditer(text)], key=re.Match.start):
        if match.start() < done or any(begin <= match.start() < end for begin, end in code):
            continue
        line = text.count("\n", 0, match.start()) + 1
        try:
            new, message = _render_one(match, path, results)
        except FigureError as error:
            failed.append(Difference(path=path, line=line, message=str(error)))
            continue
        if new != match[0]:
            changed.append(Difference(path=path, line=line, message=message))
        pieces += [text[done : match.start()], new]
        done = match.end()
    rendered = "".join([*pieces, text[done:]])
    return rendered, changed, [*failed, *_stray_markers(text, path, code)]


def _render_one(match: re.Match[str], path: Path, results: ResultFiles) -> tuple[str, str]:
    """Return the replacement of a figure or table, and what to report if it differs."""
    if "value" not in match.re.groupindex:
        body = table(match["spec"], path, results)
        return f"<!-- table\n{match['spec']}\n-->\n{body}<!-- /table -->", _table_difference(
            match["body"], body
        )
    expression, _, spec = match["spec"].rpartition(" ")
    value = formatted(results.evaluate(expression), spec)
    return (
        f"{value}{match['unit']}<!-- figure: {match['spec']} -->",
        f"{match['value']}{match['unit'].rstrip()} should be {value} ({match['spec']})",
    )


@dataclass(slots=True)
class _TableSpec:
    title: str = ""
    value: str = ""
    format: str = ""
    unit: str = ""
    relative: str = ""
    relative_format: str = ".2f"
    columns: list[tuple[str, str, str]] = field(default_factory=list)  # label, file, filters
    rows: list[tuple[str, str]] = field(default_factory=list)  # label, record


def table(spec: str, path: Path, results: ResultFiles) -> str:
    """Return the Markdown of a table, with links to its files from the document. Raises FigureError."""
    parsed = _parse_table(spec)
    heads = [_head(label, results.files(file), path, results.folder) for label, file, _ in parsed.columns]
    lines = [[parsed.title, *heads], ["---"] * (1 + len(heads))]
    lines += [
        [label, *(_cell(parsed, record, file, filters, results) for _, file, filters in parsed.columns)]
        for label, record in parsed.rows
    ]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for cells in lines)


def _head(label: str, files: Sequence[str], path: Path, results: Path) -> str:
    """Return a column's heading with a link to each of its files."""
    folder = os.path.relpath(results.resolve(), path.resolve().parent)
    labels = [label, *(str(number) for number in range(2, len(files) + 1))]
    return " ".join(f"[{one}]({folder}/{file})" for one, file in zip(labels, files, strict=True))


def _cell(spec: _TableSpec, record: str, file: str, filters: str, results: ResultFiles) -> str:
    if not results.has(file, record):
        return ""

    def value(expression: str, reduction: str = "median") -> str:
        return formatted(results.evaluate(f"{reduction} {file} {expression}"), spec.format)

    path, base = (
        shlex.quote(f"{name}{f'[{filters}]' if filters else ''}.{spec.value}")
        for name in (record, spec.relative)
    )
    text = value(path)
    least, greatest = value(path, "min"), value(path, "max")
    spread = f" ({least}–{greatest})" if least != greatest else ""
    text = f"{text} {spec.unit}".rstrip() + spread
    if not spec.relative or spec.relative == record:
        return text
    return f"{text} ({formatted(results.evaluate(f'{file} {path} / {base}'), spec.relative_format)})"


def _parse_table(text: str) -> _TableSpec:
    spec = _TableSpec()
    for line in text.splitlines():
        key, _, rest = line.partition(": ")
        match key.strip():
            case "title":
                spec.title = rest
            case "value":
                spec.value, spec.format, spec.unit = (*rest.split(maxsplit=2), "", "")[:3]
            case "relative":
                spec.relative, spec.relative_format = (*rest.split(maxsplit=1), ".2f")[:2]
            case "column":
                label, _, file = rest.rpartition(": ")
                found = split_filters(file)
                spec.columns.append((label, *((file, "") if found is None else found[:2])))
            case "row":
                label, _, record = rest.rpartition(": ")
                spec.rows.append((label, record))
            case _:
                raise FigureError(f"{line!r} is not one of title:, value:, relative:, column:, row:")
    if not (spec.value and spec.columns and spec.rows):
        raise FigureError("a table needs value:, column: and row: lines")
    return spec


def _table_difference(old: str, new: str) -> str:
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    first = next(((a, b) for a, b in pairs if a != b), None)
    if first is None:
        return f"the table has {len(old.splitlines())} lines, not {len(new.splitlines())}"
    return f"the table's row {first[0]!r} should be {first[1]!r}"


def _stray_markers(text: str, path: Path, code: Sequence[tuple[int, int]]) -> Iterator[Difference]:
    """Yield markers that no figure or table matches."""
    for mark, whole, message in (
        (
            _FIGURE_MARK,
            _FIGURE,
            "a figure marker must follow a number: 0.3 s<!-- figure: FILE PATH FORMAT -->",
        ),
        (_TABLE_MARK, _TABLE, "a table needs its lines, a line with -->, and <!-- /table -->"),
    ):
        inside = [(match.start(), match.end()) for match in whole.finditer(text)] + list(code)
        for match in mark.finditer(text):
            if not any(begin <= match.start() < end for begin, end in inside):
                yield Difference(path=path, line=text.count("\n", 0, match.start()) + 1, message=message)


def _short_names(text: str, code: Sequence[tuple[int, int]]) -> dict[str, Sequence[str]]:
    """Return the files of a document's `results` comments by short name."""
    lines = [
        line.partition(": ")
        for match in _RESULTS.finditer(text)
        if not any(begin <= match.start() < end for begin, end in code)
        for line in match["names"].splitlines()
    ]
    return {name.strip(): files.split() for name, _, files in lines}


def _code_spans(text: str) -> list[tuple[int, int]]:
    return [(match.start(), match.end()) for kind in (_FENCE, _CODE) for match in kind.finditer(text)]
