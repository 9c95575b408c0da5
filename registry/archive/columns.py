"""Rows of the ledger as Arrow tables: one column a field, parts of a row as lists of structures. Pure.

Imports pyarrow, which takes 40 MB of memory: import this where it is first used.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from registry.accounting.row_order import LedgerKind, Row
from registry.accounting.usage_chunks import HOUR_S, day_text, hour_text
from registry.errors import InvalidRecord
from registry.records.quota import DAY_S
from registry.records.usage import InstanceInterval, LostCall, RequestRecord
from registry.state import Tally, UsageFilter

RECORDS: dict[LedgerKind, type[Any]] = {
    LedgerKind.REQUESTS: RequestRecord,
    LedgerKind.INTERVALS: InstanceInterval,
    LedgerKind.LOST: LostCall,
}
END = {LedgerKind.REQUESTS: "ended_at", LedgerKind.INTERVALS: "to_at", LedgerKind.LOST: "ended_at"}
_PARTS = {LedgerKind.REQUESTS: "gpu", LedgerKind.INTERVALS: "calls"}
_TYPES = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}  # others are text
# Fields of a report that have another name here, or none.
_COLUMNS = {"key": "key_id", "hour": "ended_at", "day": "ended_at"}
_PERIODS = {"hour": (HOUR_S, hour_text), "day": (DAY_S, day_text)}
_SUMMED = ("prompt_tokens", "completion_tokens", "billed_gpu_ms")
# Costs are added in two halves, so that no sum overflows.
_HIGH = 32
_TALLIES = 10_000


@cache
def schema_of(kind: LedgerKind) -> Any:
    """Return the Arrow schema of a kind of rows."""
    return pa.schema([(name, _arrow_type(hint)) for name, hint in _fields(RECORDS[kind])])


def table_of(kind: LedgerKind, rows: Sequence[Row]) -> Any:
    """Return a table of the rows. Raises InvalidRecord for a value that its column cannot hold."""
    arrays = []
    try:
        for name, hint in _fields(RECORDS[kind]):
            values = [getattr(row, name) for row in rows]
            if get_origin(hint) is tuple:
                arrays.append(_lists(get_args(hint)[0], values))
            else:
                arrays.append(pa.array(values, _arrow_type(hint)))
    except (pa.ArrowInvalid, OverflowError) as error:
        raise InvalidRecord(f"a row of {kind.value} does not fit into its columns: {error}") from error
    return pa.Table.from_arrays(arrays, schema=schema_of(kind))


def rows_of(kind: LedgerKind, table: Any) -> list[Row]:
    """Return the rows of a table."""
    found: list[Row] = msgspec.convert(table.to_pylist(), list[RECORDS[kind]])  # type: ignore[valid-type]
    return found


def part_counts(kind: LedgerKind, table: Any) -> Any:
    """Return the number of parts of each row."""
    if kind not in _PARTS:
        return np.zeros(table.num_rows, np.int64)
    return pc.list_value_length(table[_PARTS[kind]]).to_numpy()


def integer_sums(table: Any) -> dict[str, int]:
    """Return the sum of each integer column, modulo 2**64."""
    return {
        field.name: int(table[field.name].to_numpy().astype(np.uint64).sum(dtype=np.uint64))
        for field in table.schema
        if field.type == pa.int64()
    }


def names_columns(kind: LedgerKind) -> list[str]:
    """Return the columns of which a row's names in Redis consist."""
    if kind is LedgerKind.INTERVALS:
        return ["instance_id", "state", "from_at"]
    return ["id"] if kind is LedgerKind.LOST else ["request_id", "client_request_id", "ended_at"]


def tally_columns(by: Iterable[str], *, counts: bool) -> list[str]:
    """Return the columns that `grouped` and a filter read."""
    summed = () if counts else ("cost_nanos", *_SUMMED)
    return sorted({*(_COLUMNS.get(name, name) for name in by), "ended_at", "function", "tenant", *summed})


def grouped(table: Any, by: Sequence[str], *, counts: bool) -> Any:
    """Return the sums of requests by some fields of a report: these as `by NAME`, then the sums."""
    columns = {}
    for name in by:
        if name in _PERIODS:
            ends = table["ended_at"].to_numpy()
            columns[name] = pa.array(np.floor_divide(ends, _PERIODS[name][0]).astype(np.int64))
        else:
            columns[name] = table[_COLUMNS.get(name, name)]
    names, sums = [f"by {name}" for name in columns], {"count": pa.array(np.ones(table.num_rows, np.int64))}
    if not counts:
        cost = table["cost_nanos"]
        sums |= {name: table[name] for name in _SUMMED}
        sums |= {"high": pc.shift_right(cost, _HIGH), "low": pc.bit_wise_and(cost, (1 << _HIGH) - 1)}
    return _added(pa.table([*columns.values(), *sums.values()], names=[*names, *sums]))


def regrouped(tables: Sequence[Any]) -> Any:
    """Return the sums of several tables of sums."""
    return tables[0] if len(tables) == 1 else _added(pa.concat_tables(tables))


def _added(table: Any) -> Any:
    names = [name for name in table.column_names if name.startswith("by ")]
    summed = [name for name in table.column_names if name not in names]
    sums = table.group_by(names, use_threads=False).aggregate([(name, "sum") for name in summed])
    return sums.select([*names, *(f"{name}_sum" for name in summed)]).rename_columns([*names, *summed])


def tallies(sums: Any, by: Sequence[str]) -> Iterator[list[Tally]]:
    """Yield a table of sums as a report adds them up, some at a time: a conversion holds the interpreter."""
    for start in range(0, sums.num_rows, _TALLIES):
        found = sums.slice(start, _TALLIES).to_pydict()
        values = []
        for name in by:
            text = _PERIODS[name][1] if name in _PERIODS else None
            values.append([text(value) for value in found[f"by {name}"]] if text else found[f"by {name}"])
        amounts = [found["count"]]
        if "high" in found:
            halves = zip(found["high"], found["low"], strict=True)
            costs = [(high << _HIGH) + low for high, low in halves]
            amounts += [*(found[name] for name in _SUMMED), costs]
        groups = zip(*values, strict=True) if values else [()] * len(found["count"])
        yield list(zip(groups, zip(*amounts, strict=True), strict=True))


def matching(table: Any, where: UsageFilter) -> Any:
    """Return the requests of a table, in order of their ends, that match a filter."""
    ends = table["ended_at"].to_numpy()
    start = 0 if where.since is None else int(np.searchsorted(ends, where.since, "left"))
    stop = len(ends) if where.until is None else int(np.searchsorted(ends, where.until, "left"))
    table = table.slice(start, max(0, stop - start))
    masks = [
        pc.equal(table[name], value)
        for name, value in (("function", where.function), ("tenant", where.tenant))
        if value is not None
    ]
    for mask in masks[1:]:
        masks[0] = pc.and_(masks[0], mask)
    return table.filter(masks[0]) if masks else table


def replaced(table: Any, where: tuple[str, str], values: dict[str, Any]) -> Any:
    """Return the table with other values in the rows in which one column has a value."""
    mask = pc.equal(table[where[0]], where[1])
    for name, value in values.items():
        at = table.schema.get_field_index(name)
        kind = table.schema.field(at).type
        table = table.set_column(at, name, pc.if_else(mask, pa.scalar(value, kind), table[name]))
    return table


def _fields(kind: type[Any]) -> list[tuple[str, Any]]:
    return list(get_type_hints(kind).items())


def _arrow_type(hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return pa.list_(pa.struct([(name, _arrow_type(of)) for name, of in _fields(get_args(hint)[0])]))
    return _TYPES.get(hint, pa.string())


def _lists(part: type[Any], values: Sequence[Sequence[Any]]) -> Any:
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    flat = [one for parts in values for one in parts]
    fields = _fields(part)
    arrays = [pa.array([getattr(one, name) for one in flat], _arrow_type(hint)) for name, hint in fields]
    struct = pa.StructArray.from_arrays(arrays, fields=[pa.field(n, _arrow_type(h)) for n, h in fields])
    return pa.ListArray.from_arrays(pa.array(offsets), struct)
