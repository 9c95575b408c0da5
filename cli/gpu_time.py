"""`gpu-time`: what accelerators did with their time."""

from pathlib import Path

import click

from cli.options import client_options, connect, period_options, query, report_output_options
from cli.output import emit_report
from registry.gpu_report import COLUMNS, PROPERTIES, RESOLUTIONS_S


@click.command("gpu-time")
@click.option(
    "--by",
    default=",".join(PROPERTIES),
    show_default=True,
    help="What to have rows of; '' for the whole cluster.",
)
@period_options
@click.option(
    "--resolution", type=click.Choice(tuple(RESOLUTIONS_S)), help="Rows by minute, hour or day (UTC)."
)
@report_output_options
@client_options
def gpu_time_command(
    by: str,
    since: float | None,
    until: float | None,
    function: str | None,
    tenant: str | None,
    resolution: str | None,
    form: str,
    file: Path | None,
    url: str | None,
    api_key: str | None,
) -> None:
    """GPU time: allocated = attributed (to requests) + loading + idle; lost time is a part of idle.

    Loading and idle time belong to no tenant. Other rows than those of a tenant are for admins.

    Example: hypercast gpu-time --since 24h --resolution 1h -o parquet --file gpu.parquet
    """
    asked = query(by=by, since=since, until=until, function=function, tenant=tenant, resolution=resolution)
    with connect(url, api_key) as client:
        rows = client.json("GET", "/admin/usage/gpu-time", params=asked)["rows"]
    given = {name.strip() for name in by.split(",")}
    emit_report(rows, [name for name in COLUMNS if name in given or name not in PROPERTIES], form, file)
