"""Values in result files, found by the expressions that `benchmarks.harness.figures` explains."""

import json
import operator
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
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
_FILTERS = re.compile(r"^(?P<name>[^\[\]]*)\[(?P<filters>[^\[\]]+)\](?P<rest>.*)$")


class FigureError(ValueError):
    """A marker is malformed, or names a file, record or field that does not exist."""


@dataclass(slots=True)
class ResultFiles:
    """The result files of one folder, read on demand."""

    folder: Path
    short_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _read: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def files(self, name: str) -> Sequence[str]:
        """Return the files of a short name, or the name itself."""
        return self.short_names.get(name, (name,))

    def records(self, file: str) -> list[dict[str, Any]]:
        """Return a file's records. Raises FigureError."""
        if file not in self._read:
            try:
                self._read[file] = json.loads((self.folder / file).read_text())
            except (OSError, ValueError) as error:
                raise FigureError(f"cannot read {self.folder / file}: {error}") from error
        return self._read[file]

    def has(self, name: str, record: str) -> bool:
        """Return whether one of these files has such a record, which counts. Raises FigureError."""
        return any(
            one.get("name") == record and one.get("counts") is not False
            for file in self.files(name)
            for one in self.records(file)
        )

    def value(self, file: str, path: str) -> Any:
        """Return the value at a path of a file. Raises FigureError."""
        found = split_filters(path)
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
        found = [one for one in records if name in ("", one.get("name")) and _passes(one, conditions)]
        for record in found:
            if record.get("counts") is not False or "counts" in conditions:
                return record
        path = f"{name}{f'[{filters}]' if filters else ''}"
        if found:
            raise FigureError(f"{path} of {file} does not count")
        known = ", ".join(dict.fromkeys(str(record.get("name")) for record in records))
        raise FigureError(f"{file} has no record {path}: it has {known}")

    def evaluate(self, expression: str) -> Any:
        """Evaluate `[REDUCTION] FILE PATH [OPERATOR OPERAND]...`. Raises FigureError."""
        try:
            first, *rest = shlex.split(expression)
        except ValueError as error:
            raise FigureError(f"{expression!r}: {error}") from error
        reduction, (name, *words) = (first, rest) if first in REDUCTIONS and rest else ("", [first, *rest])
        if len(words) % 2 == 0:
            raise FigureError(f"{expression!r} is not FILE PATH [OPERATOR PATH]...")
        values, errors = [], []
        for file in self.files(name):
            try:
                value = self._calculate(file, words, expression)
                if value is None:
                    raise FigureError(f"{expression!r} is null in {file}")
                values.append(value)
            except FigureError as error:
                errors.append(error)
        if not values:
            raise errors[0] if errors else FigureError(f"{name} has no file")
        return values[0] if len(values) == 1 else REDUCTIONS[reduction or "median"](values)

    def _calculate(self, file: str, words: Sequence[str], expression: str) -> Any:
        """Evaluate the operands and operators in one file. Raises FigureError."""
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
        return self.evaluate(f"{other} {path}") if colon else self.value(file, text)


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


def split_filters(path: str) -> tuple[str, str, str] | None:
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
