"""Rows as CSV and Parquet bytes."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# Columns that hold a moment in Unix seconds.
_MOMENTS = frozenset({"from", "to"})


def to_csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return a header line and a line for each row; a missing value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row.get(column) for column in columns] for row in rows)
    return out.getvalue()


def to_parquet(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    """Return one compressed table. Columns of numbers are int64, moments UTC timestamps, others strings."""
    import pyarrow  # 40 MB of memory
    from pyarrow import parquet

    arrays = []
    for column in columns:
        values = [row.get(column) for row in rows]
        if column in _MOMENTS:
            micros = [None if value is None else round(value * 1e6) for value in values]
            arrays.append(pyarrow.array(micros, pyarrow.timestamp("us", tz="UTC")))
        elif any(isinstance(value, int) for value in values) or column.endswith(("_ms", "_nanos", "_tokens")):
            arrays.append(pyarrow.array(values, pyarrow.int64()))
        else:
            arrays.append(pyarrow.array(values, pyarrow.string()))
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays, names=list(columns)), out, compression="zstd")
    return out.getvalue()
