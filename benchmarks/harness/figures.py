"""Figures in Markdown that come from result files: inline figures and tables, rendered from their markers.

An inline figure is a number, an optional unit and an HTML comment, which Markdown does not show:

    P90 is 0.309 s<!-- figure: scaleout-13b-k4-host-2026-11-23.json hypercast.ttft_p90_s .3f -->

The comment names a file of benchmarks/results (or a short name for it, see below), an expression and a
Python format. An expression has one or more operands (paths or numbers) with `+ - * /` between them,
evaluated from left to right. A path is the name of a record (none for the first one: `.median_s`), filters
on its fields or `params` if several records have that name (`hypercast[batch=8,mode=alone]`), and fields or
list indices. It may end with a reduction (count, min, max, sum, median, mean), and `*` stands for every
element of a list: `.switches.*.context.min`. A later path may name another file: `FILE:PATH`.

A document can give its files short names, so that a newer run needs one change:

    <!-- results
    k4: scaleout-13b-k4-host-2026-11-23.json
    -->

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
A column is a file (with filters, if needed), a row a record of it; a cell without a record stays empty.
"""

import json
import operator
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REDUCTIONS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "count": len,
    "min": min,
    "max": max,
    "sum": sum,
    "median": statistics.median,
    "mean": statistics.fmean,
}
_OPERATORS: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
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
_FILTERS = re.compile(r"^(?P<name>[^\[\]]*)\[(?P<filters>[^\[\]]+)\](?P<rest>.*)$")


class FigureError(ValueError):
    """A marker is malformed, or names a file, record or field that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A figure or table in a document that differs from its result file, or a marker that is wrong."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(slots=True)
class ResultFiles:
    """The result files of one folder, read on demand."""

    folder: Path
    short_names: Mapping[str, str] = field(default_factory=dict)
    _read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def file(self, name: str) -> str:
        """Return the file of a short name, or the name itself."""
        return self.short_names.get(name, name)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return a file's records. Raises FigureError."""
        name = self.file(name)
        if name not in self._read:
            try:
                self._read[name] = json.loads((self.folder / name).read_text())
            except (OSError, ValueError) as error:
                raise FigureError(f"cannot read {self.folder / name}: {error}") from error
        return self._read[name]

    def value(self, file: str, path: str) -> Any:
        """Return the value at a path of a file. Raises FigureError."""
        found = _split_filters(path)
        if found is None:
            name, _, rest = path.partition(".")
            record = self.record(file, name)
        else:
            name, filters, rest = found
            record = self.record(file, name, filters)
        return follow(record, [part for part in rest.split(".") if part], f"{file} {path}")

    def record(self, file: str, name: str, filters: str = "") -> dict[str, Any]:
        """Return the first record of that name (any, if empty) passing the filters. Raises FigureError."""
        records = self.records(file)
        conditions = dict(_key_value(one) for one in filters.split(",")) if filters else {}
        for record in records:
            if name in ("", record.get("name")) and _passes(record, conditions):
                return record
        known = ", ".join(dict.fromkeys(str(record.get("name")) for record in records))
        raise FigureError(f"{file} has no record {name}{f'[{filters}]' if filters else ''}: it has {known}")

    def evaluate(self, expression: str) -> Any:
        """Evaluate `FILE PATH [OPERATOR OPERAND]...`. Raises FigureError."""
        file, *words = expression.split()
        if len(words) % 2 == 0:
            raise FigureError(f"{expression!r} is not FILE PATH [OPERATOR PATH]...")
        result = self._operand(file, words[0])
        for sign, operand in zip(words[1::2], words[2::2], strict=True):
            if sign not in _OPERATORS:
                raise FigureError(f"{sign!r} in {expression!r} is none of {' '.join(_OPERATORS)}")
            try:
                result = _OPERATORS[sign](result, self._operand(file, operand))
            except (TypeError, ZeroDivisionError) as error:
                raise FigureError(f"{expression!r}: {error}") from error
        return result

    def _operand(self, file: str, text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            pass
        other, colon, path = text.partition(":")
        return self.value(other, path) if colon else self.value(file, text)


def follow(value: Any, parts: Sequence[str], where: str) -> Any:
    """Return what lies at the end of these fields, indices and reductions. Raises FigureError."""
    for number, part in enumerate(parts):
        if part == "*" and isinstance(value, list):
            value = [follow(one, _before_reduction(parts[number + 1 :]), where) for one in value]
            last = parts[-1]
            return REDUCTIONS[last](value) if last in REDUCTIONS else value
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif (
            isinstance(value, list) and re.fullmatch(r"-?\d+", part) and -len(value) <= int(part) < len(value)
        ):
            value = value[int(part)]
        elif isinstance(value, list | dict) and part in REDUCTIONS and part == parts[-1]:
            return REDUCTIONS[part](list(value))
        else:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise FigureError(f"{where}: no field {part!r} in {known}")
    return value


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
    folder = os.path.relpath(results.folder.resolve(), path.resolve().parent)
    heads = [f"[{label}]({folder}/{results.file(file)})" for label, file, _ in parsed.columns]
    lines = [[parsed.title, *heads], ["---"] * (1 + len(heads))]
    lines += [
        [label, *(_cell(parsed, record, file, filters, results) for _, file, filters in parsed.columns)]
        for label, record in parsed.rows
    ]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for cells in lines)


def _cell(spec: _TableSpec, record: str, file: str, filters: str, results: ResultFiles) -> str:
    if not any(one.get("name") == record for one in results.records(file)):
        return ""
    parts, where = spec.value.split("."), f"{file} {record}.{spec.value}"
    value = follow(results.record(file, record, filters), parts, where)
    text = f"{formatted(value, spec.format)} {spec.unit}".rstrip()
    if not spec.relative or spec.relative == record:
        return text
    base = follow(results.record(file, spec.relative, filters), parts, where)
    return f"{text} ({formatted(value / base, spec.relative_format)})"


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
                found = _split_filters(file)
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


def _short_names(text: str, code: Sequence[tuple[int, int]]) -> dict[str, str]:
    """Return the files of a document's `results` comments by short name."""
    lines = [
        line.partition(": ")
        for match in _RESULTS.finditer(text)
        if not any(begin <= match.start() < end for begin, end in code)
        for line in match["names"].splitlines()
    ]
    return {name.strip(): file.strip() for name, _, file in lines}


def _code_spans(text: str) -> list[tuple[int, int]]:
    return [(match.start(), match.end()) for kind in (_FENCE, _CODE) for match in kind.finditer(text)]


def _split_filters(path: str) -> tuple[str, str, str] | None:
    """Split `name[filters]rest`."""
    match = _FILTERS.match(path)
    return (match["name"], match["filters"], match["rest"]) if match else None


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise FigureError(f"{text!r} is not FIELD=VALUE")
    return key.strip(), value.strip()


def _passes(record: Mapping[str, Any], conditions: Mapping[str, str]) -> bool:
    fields = {**record.get("params", {}), **record}
    return all(str(fields.get(key)) == value for key, value in conditions.items())


def _before_reduction(parts: Sequence[str]) -> Sequence[str]:
    return parts[:-1] if parts and parts[-1] in REDUCTIONS else parts
