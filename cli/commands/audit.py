"""`audit`: who changed what."""

from typing import Any

import click

from cli.client import Client
from cli.options import client_options, output_option, query, time_options
from cli.output import emit_rows
from cli.tables import Column, Row
from cli.values import utc

PAGE = 1000

FIELDS = (
    *("at", "operation", "target", "made", "status", "code", "key_id", "tenant", "role", "address"),
    *("fields", "gateway", "id", "client_request_id", "ended_at"),
)


def _outcome(row: Row) -> str:
    if row["status"] is None:
        return "open"
    return f"{row['status']} {row['code']}".strip()


COLUMNS = (
    Column(field="at", heading="TIME", shown=lambda row: utc(row["at"])),
    Column(field="operation"),
    Column(field="target", shrink=8),
    Column(field="made", drop=4),
    Column(field="status", heading="OUTCOME", shown=_outcome),
    Column(field="key_id", heading="KEY ID", shown=lambda row: row["key_id"] or f"({row['gateway']})"),
    Column(field="tenant", drop=2, shrink=6),
    Column(field="role", drop=5),
    Column(field="address", heading="FROM", drop=3),
    Column(field="fields", wide=True, shown=lambda row: ", ".join(row["fields"])),
    Column(field="gateway", wide=True),
    Column(field="id", heading="REQUEST ID", wide=True),
)


@click.command("audit")
@time_options
@click.option("--key", help="Only changes with the key of this id.")
@click.option("--operation", help="Only this operation, such as key.create, or a group such as key.")
@click.option("--refused", is_flag=True, help="Show attempts of keys that lacked the right instead.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Most entries to show.")
@output_option
@client_options
def audit_command(refused: bool, limit: int, form: str, client: Client, **where: Any) -> None:
    """Show who changed what, the latest first.

    The outcome `open` is that of a change which is running, or of which the gateway died meanwhile.

    \b
    Examples:
      hypercast audit --since 1d
      hypercast audit --operation key. -o csv
    """
    rows: list[Row] = []
    cursor = None
    while len(rows) < limit:
        left = min(PAGE, limit - len(rows))
        parameters = query(**where, log="refused" if refused else None, limit=left, cursor=cursor)
        answer = client.json("GET", "/admin/audit", params=parameters)
        rows += answer["entries"]
        cursor = answer["next"]
        if not cursor:
            break
    emit_rows(rows, COLUMNS, FIELDS, form)
