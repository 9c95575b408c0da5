"""`usage`: what was used and what it costs."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from cli.client import Client, segment
from cli.errors import CliError
from cli.options import (
    DURATION,
    client_options,
    connect,
    output_option,
    period_options,
    query,
    report_output_options,
    time_options,
)
from cli.output import emit_record, emit_report, emit_rows, table
from registry.usage_groups import DEFAULT_BY, PROPERTIES
from registry.usage_report import COLUMNS

SUMMARY_COLUMNS = (
    "function",
    "tenant",
    "requests",
    "ok",
    "failed",
    "cancelled",
    "prompt_tokens",
    "completion_tokens",
    "gpu_s",
    "queue_p50_ms",
    "queue_p95_ms",
    "exec_p50_ms",
    "exec_p95_ms",
    "cost",
    "currency",
)
_SUMS = (
    "requests",
    "ok",
    "failed",
    "cancelled",
    "prompt_tokens",
    "completion_tokens",
    "billed_gpu_ms",
    "cost_nanos",
)
CHECK_PAUSE_S = 2.0


@click.group("usage")
def usage_command() -> None:
    """Usage and cost, from the ledger."""


@usage_command.command("report")
@click.option(
    "--by", default=",".join(DEFAULT_BY), show_default=True, help=f"What to sum by: {', '.join(PROPERTIES)}."
)
@period_options
@click.option("--key", help="Only requests with the key of this id.")
@report_output_options
@client_options
def report(
    by: str,
    since: float | None,
    until: float | None,
    function: str | None,
    tenant: str | None,
    key: str | None,
    form: str,
    file: Path | None,
    url: str | None,
    api_key: str | None,
) -> None:
    """Sums by function and tenant, or others. Costs are in billionths of the currency unit.

    Example: hypercast usage report --by tenant,day --since 7d -o csv
    """
    asked = query(by=by, since=since, until=until, function=function, tenant=tenant, key=key)
    with connect(url, api_key) as client:
        answer = client.json("GET", "/admin/usage/report", params=asked)
    emit_report(answer["rows"], (*(name.strip() for name in by.split(",")), *COLUMNS), form, file)


@usage_command.command("summary")
@period_options
@output_option
@client_options
def summary(
    since: float | None,
    until: float | None,
    function: str | None,
    tenant: str | None,
    form: str,
    url: str | None,
    api_key: str | None,
) -> None:
    """Requests, time and cost of a period, by function and tenant.

    Example: hypercast usage summary --since 24h
    """
    asked = query(since=since, until=until, function=function, tenant=tenant)
    with connect(url, api_key) as client:
        rows = [readable(row) for row in client.json("GET", "/admin/usage/summary", params=asked)["rows"]]
    if form == "table" and len(rows) > 1:
        rows += totals(rows)
    emit_rows(rows, SUMMARY_COLUMNS, form)


@usage_command.command("show")
@click.argument("request_id")
@output_option
@client_options
def show(request_id: str, form: str, url: str | None, api_key: str | None) -> None:
    """One request's record, by the id in its x-request-id header, and where its GPU time was used.

    Example: hypercast usage show req-4f1c…
    """
    with connect(url, api_key) as client:
        record = client.json("GET", f"/admin/usage/show/{segment(request_id)}")
    if form != "table":
        emit_record(record, form)
        return
    slices = record.pop("gpu", [])
    emit_record(record, form)
    if slices:
        sys.stdout.write("\n" + table(slices, ("call_id", "instance_id", "node", "gpu_us")))


@usage_command.command("check")
@click.option("--wait", type=DURATION, default=0.0, help="Look again for so long, until everything adds up.")
@time_options
@output_option
@client_options
def check(
    wait: float, since: float | None, until: float | None, form: str, url: str | None, api_key: str | None
) -> None:
    """Whether what instances were busy for is what requests were told they used, to the microsecond.

    Exits with 1 where it is proven that it is not. `open` instances have calls in flight, or used time
    that their node has yet to write down (at most its --meter-interval): --wait for them. What is
    `unproven` adds up, but an earlier release did not write what would prove it.

    Example: hypercast usage check --since 24h --wait 90s
    """
    asked = query(since=since, until=until)
    with connect(url, api_key) as client:
        found = checked(client, asked, time.monotonic() + wait)
    if form == "table":
        sys.stdout.write(
            f"{found['verdict']}: {found['requests']} requests on {found['instances_checked']} instances "
            f"of {found['nodes_checked']} nodes\n"
        )
        if found["instances"]:
            emit_rows(found["instances"], tuple(found["instances"][0]), form)
        if found["nodes"]:
            emit_rows(found["nodes"], tuple(found["nodes"][0]), form)
    else:
        emit_record(found, form)
    if found["verdict"] == "wrong":
        raise CliError("the ledger does not add up")


def checked(client: Client, asked: dict[str, object], until_s: float) -> dict[str, Any]:
    """The check's answer, asked for again until it can change no more for the better, or the time is over."""
    while True:
        found: dict[str, Any] = client.json("GET", "/admin/usage/check", params=asked)
        left_s = until_s - time.monotonic()
        if found["verdict"] in ("exact", "unproven") or left_s <= 0:
            return found
        time.sleep(min(CHECK_PAUSE_S, left_s))


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its cost in the currency's unit and its GPU time in seconds."""
    return {**row, "gpu_s": row["billed_gpu_ms"] / 1000, "cost": money(row["cost_nanos"])}


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each currency."""
    found = []
    for currency in sorted({row["currency"] for row in rows}):
        of_currency = [row for row in rows if row["currency"] == currency]
        sums = {name: sum(row[name] for row in of_currency) for name in _SUMS}
        found.append(readable({"function": "total", "currency": currency, **sums}))
    return found


def money(nanos: int) -> str:
    """An exact amount, without needless zeros: 0.0000238."""
    whole, rest = divmod(abs(nanos), 10**9)
    digits = f"{rest:09}".rstrip("0").ljust(2, "0")
    return f"{'-' if nanos < 0 else ''}{whole}.{digits}"
