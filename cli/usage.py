"""`usage`: what was used and what it costs."""

import time

import click

from cli.client import segment
from cli.options import DURATION, client_options, connect, output_option
from cli.output import emit_record, emit_rows

REPORT_COLUMNS = (
    "function",
    "tenant",
    "requests",
    "prompt_tokens",
    "completion_tokens",
    "billed_gpu_ms",
    "cost_nanos",
)


@click.group("usage")
def usage_command() -> None:
    """Usage and cost, from the ledger."""


@usage_command.command("report")
@click.option("--since", type=DURATION, help="Only the last so long, e.g. 24h.")
@click.option("--function", help="Only this function.")
@click.option("--tenant", help="Only this tenant.")
@output_option
@client_options
def report(
    since: float | None,
    function: str | None,
    tenant: str | None,
    form: str,
    url: str | None,
    api_key: str | None,
) -> None:
    """Sums by function and tenant. Costs are in billionths of the currency unit.

    Example: hypercast usage report --since 24h -o csv
    """
    query = {
        "since": time.time() - since if since is not None else None,
        "function": function,
        "tenant": tenant,
    }
    with connect(url, api_key) as client:
        answer = client.json(
            "GET", "/admin/usage/report", params={key: v for key, v in query.items() if v is not None}
        )
    emit_rows(answer["rows"], REPORT_COLUMNS, form)


@usage_command.command("show")
@click.argument("request_id")
@output_option
@client_options
def show(request_id: str, form: str, url: str | None, api_key: str | None) -> None:
    """One request's record, by the id in its x-request-id header.

    Example: hypercast usage show req-4f1c…
    """
    with connect(url, api_key) as client:
        emit_record(client.json("GET", f"/admin/usage/show/{segment(request_id)}"), form)
