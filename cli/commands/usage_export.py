"""`usage export`: all requests for other billing tools."""

from pathlib import Path
from typing import Any

import click

from cli.client import Client
from cli.errors import UsageError
from cli.exports import export_target, write_csv, write_lines, write_parquet
from cli.options import client_options, period_options, query
from cli.progress import note
from cli.values import money
from registry.exports.exporter import ExportFormat

_WRITERS = {"csv": write_csv, "parquet": write_parquet, "jsonl": write_lines}


@click.command("export")
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in ExportFormat]),
    required=True,
    help="FOCUS 1.2 (rows by day), events of OpenMeter (CloudEvents), or events of Lago.",
)
@period_options
@click.option("--provider", help="Name of the platform's operator in FOCUS.  [default: Hypercast]")
@click.option(
    "-o",
    "--output",
    "kind",
    type=click.Choice(list(_WRITERS)),
    metavar="FORMAT",
    help="csv or parquet of FOCUS; jsonl, an event a line, of the others.  [default: csv, or jsonl]",
)
@click.option(
    "--file", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of stdout."
)
@client_options
def export(form: str, kind: str | None, file: Path | None, client: Client, **period: Any) -> None:
    """Write requests as rows or events for other billing tools.

    Costs add up to the ledger's to the nano. A row or event of the same requests has the same id in each
    export, so that what is sent twice counts once. A file is there only when all of it is.

    \b
    Examples:
      hypercast usage export --format focus --since 2026-11-01 --until 2026-12-01 --file november.csv
      hypercast usage export --format focus -o parquet --file focus.parquet
      hypercast usage export --format openmeter --since 24h
    """
    own = ("csv", "parquet") if form == ExportFormat.FOCUS else ("jsonl",)
    kind = kind or own[0]
    if kind not in own:
        raise UsageError(f"--format {form} is written as {' or '.join(own)}, not as {kind}")
    if period["provider"] is not None and form != ExportFormat.FOCUS:
        raise UsageError("--provider is a column of FOCUS: leave it out")
    with export_target(file, binary=kind == "parquet") as out:
        with client.stream("GET", "/admin/usage/export", params=query(format=form, **period)) as response:
            totals = _WRITERS[kind](response.iter_lines(), out)
    cost = f", {money(totals.cost_nanos, totals.currency)}" if totals.currency else ""
    note(f"{totals.rows} {'rows' if form == ExportFormat.FOCUS else 'events'}{cost}")
