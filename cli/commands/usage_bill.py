"""`usage bill`: what was used in a period and what it costs, by day and by key."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from cli.client import Client
from cli.options import client_options, output_option, period_options, query
from cli.output import emit_record, emit_rows, write
from cli.tables import Column, Row
from cli.values import money, utc
from registry.accounting.usage_report import COLUMNS


def thousandths(field: str, heading: str) -> Column:
    """Return a column of a field in its thousand times larger unit."""
    return Column(field=field, heading=heading, numeric=True, shown=lambda row: f"{row[field] / 1000:.3f}")


def _cost(row: Row) -> str:
    return money(row["cost_nanos"], row["currency"])


PROMPT = Column(field="prompt_tokens", heading="PROMPT TOKENS", numeric=True, drop=4)
OUTPUT = Column(field="completion_tokens", heading="OUTPUT TOKENS", numeric=True, drop=3)
GPU_SECONDS = thousandths("billed_gpu_ms", "GPU S")
COST = Column(field="cost_nanos", heading="COST", numeric=True, shown=_cost)
SUM_COLUMNS = (Column(field="requests", numeric=True, drop=1), PROMPT, OUTPUT, GPU_SECONDS, COST)

_DAY_COLUMNS = (Column(field="day"), *SUM_COLUMNS)
_KEY_COLUMNS = (Column(field="tenant", shrink=8), Column(field="key", shrink=8), *SUM_COLUMNS)


@click.command("bill")
@period_options
@output_option
@client_options
def bill(form: str, client: Client, **period: Any) -> None:
    """Show use and cost by day and by key, with totals; of the present month (UTC) unless a period is given.

    JSON has the totals, the days and the keys; CSV has a row for each day and key.

    \b
    Examples:
      hypercast usage bill
      hypercast usage bill --since 2026-10-01 --until 2026-11-01 --tenant acme
      hypercast usage bill --since 7d -o json
    """
    now = time.time()
    until = now if period["until"] is None else period["until"]
    since = month_start(min(now, until)) if period["since"] is None else period["since"]
    where = query(**{**period, "since": since, "until": until})
    if form == "csv":
        rows = client.json("GET", "/admin/usage/report", params={**where, "by": "day,tenant,key"})["rows"]
        emit_rows(rows, (), ("day", "tenant", "key", *COLUMNS), form)
        return
    days = client.json("GET", "/admin/usage/report", params={**where, "by": "day"})
    keys = client.json("GET", "/admin/usage/report", params={**where, "by": "tenant,key"})
    currency = days["currency"]
    total = sums_of(days["rows"])
    if form == "json":
        whole = {"since": since, "until": until, "currency": currency, "total": total}
        emit_record({**whole, "days": days["rows"], "keys": keys["rows"]}, form)
        return
    of_whom = f" of tenant {period['tenant']}" if period["tenant"] else ""
    cost = money(total["cost_nanos"], currency)
    write(f"{utc(since)} to {utc(until)}: {total['requests']} requests{of_whom}, {cost}\n\n")
    emit_rows(with_total(days["rows"], "day", currency), _DAY_COLUMNS, (), form)
    write("\n")
    emit_rows(with_total(keys["rows"], "tenant", currency), _KEY_COLUMNS, (), form)


def with_total(rows: Sequence[Row], label: str, currency: str) -> list[Row]:
    """Return rows of one currency for a table, several with their total below, named in the field `label`."""
    shown: list[Row] = [{**row, "currency": currency} for row in rows]
    if len(rows) > 1:
        shown.append({label: "total", "currency": currency, **sums_of(rows)})
    return shown


def sums_of(rows: Sequence[Row]) -> dict[str, int]:
    """Return the sums of rows."""
    return {name: sum(row[name] for row in rows) for name in COLUMNS}


def month_start(at: float) -> float:
    """Return the start of the UTC month of a moment (Unix seconds)."""
    moment = datetime.fromtimestamp(at, UTC)
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
