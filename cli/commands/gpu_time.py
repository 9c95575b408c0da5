"""`gpu-time`: how accelerators spent their time."""

from pathlib import Path
from typing import Any

import click

from cli.client import Client
from cli.options import client_options, period_options, query, report_output_options
from cli.output import emit_report
from cli.tables import Column, Row
from registry.accounting.gpu_report import COLUMNS, PROPERTIES, RESOLUTIONS_S


def _time(field: str, heading: str, *, wide: bool = False, drop: int = 0) -> Column:
    def shown(row: Row) -> str:
        return f"{row[field] / 1000:.3f}s"

    return Column(field=field, heading=heading, numeric=True, shown=shown, wide=wide, drop=drop)


TIME_COLUMNS = (
    Column(field="from", wide=True),
    Column(field="to", wide=True),
    Column(field="function", shrink=6),
    Column(field="tenant", shrink=6),
    Column(field="node", shrink=6),
    _time("allocated_ms", "TOTAL"),
    _time("used_ms", "USED"),
    _time("loading_ms", "LOADING", drop=1),
    _time("idle_ms", "IDLE", drop=2),
    _time("lost_ms", "LOST", wide=True),
    _time("attributed_ms", "BILLED", wide=True),
)


@click.command("gpu-time")
@click.option(
    "--by",
    default=",".join(PROPERTIES),
    show_default=True,
    help="Group by these, separated by commas; '' for one sum over the cluster.",
)
@period_options
@click.option(
    "--resolution", type=click.Choice(tuple(RESOLUTIONS_S)), help="One row per minute, hour or day (UTC)."
)
@report_output_options
@client_options
def gpu_time_command(
    by: str, resolution: str | None, form: str, file: Path | None, client: Client, **period: Any
) -> None:
    """Show GPU time: used by requests, loading, idle.

    TOTAL = USED + LOADING + IDLE. With -o wide, LOST is time that a failed instance used without a
    record of it, a part of IDLE; BILLED is USED as in bills, where each request is rounded up to a
    millisecond (attributed_ms in JSON). Loading and idle time belong to no tenant, so that rows without
    a tenant are for admins.

    \b
    Examples:
      hypercast gpu-time --since 24h
      hypercast gpu-time --by node --resolution 1h
      hypercast gpu-time --since 24h -o parquet --file gpu.parquet
    """
    parameters = query(by=by, **period, resolution=resolution)
    rows = client.json("GET", "/admin/usage/gpu-time", params=parameters)["rows"]
    groups = {name.strip() for name in by.split(",")}
    names = [name for name in COLUMNS if name in groups or name not in PROPERTIES]
    columns = [column for column in TIME_COLUMNS if column.field in names]
    if resolution:
        columns[0] = Column(field="from")
    emit_report(rows, columns, names, form, file)
