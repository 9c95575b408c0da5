"""`usage`: use and cost, from the ledger."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from cli.client import Client, segment
from cli.commands.usage_bill import COST, GPU_SECONDS, SUM_COLUMNS, bill, thousandths, with_total
from cli.commands.usage_export import export
from cli.errors import CliError, UsageError
from cli.options import (
    DURATION,
    MOMENT,
    client_options,
    output_option,
    period_options,
    query,
    report_output_options,
    time_options,
)
from cli.output import emit_record, emit_report, emit_rows, write, write_fields
from cli.progress import note, row_meter, waiting
from cli.tables import Column, Row, coloured, colours_wanted
from cli.values import money, utc_ms
from registry.accounting.usage_groups import DEFAULT_BY, PROPERTIES, SummaryRow
from registry.accounting.usage_report import COLUMNS

SUMMARY_FIELDS = [field.name for field in fields(SummaryRow)]
_SUMS = (*SUMMARY_FIELDS[2:9], "cost_nanos")
CHECK_PAUSE_S = 2.0
VERDICTS = {"open": "not yet settled"}


def _verdict(row: Row) -> str:
    return str(VERDICTS.get(row["verdict"], row["verdict"]))


SUMMARY_COLUMNS = (
    Column(field="function", shrink=10),
    Column(field="tenant", shrink=8),
    Column(field="requests", numeric=True),
    Column(field="ok", heading="OK", numeric=True, wide=True),
    Column(field="failed", numeric=True, drop=5),
    Column(field="cancelled", numeric=True, wide=True),
    Column(field="prompt_tokens", heading="PROMPT TOKENS", numeric=True, wide=True),
    Column(field="completion_tokens", heading="OUTPUT TOKENS", numeric=True, wide=True),
    GPU_SECONDS,
    Column(field="queue_p50_ms", heading="QUEUE P50 MS", numeric=True, drop=4),
    Column(field="queue_p95_ms", heading="QUEUE P95 MS", numeric=True, drop=6),
    Column(field="exec_p50_ms", heading="EXEC P50 MS", numeric=True, drop=3),
    Column(field="exec_p95_ms", heading="EXEC P95 MS", numeric=True, drop=7),
    COST,
)
SLICE_COLUMNS = (
    Column(field="call_id", shrink=12),
    Column(field="instance_id", heading="INSTANCE", shrink=12),
    Column(field="node", shrink=8),
    thousandths("gpu_us", "GPU MS"),
)
CHECK_COLUMNS = (
    Column(field="instance_id", heading="INSTANCE", shrink=12),
    Column(field="node", shrink=8),
    Column(field="verdict", state=True, shown=_verdict),
    thousandths("busy_us", "METERED MS"),
    thousandths("used_us", "BILLED MS"),
    Column(field="missing_us", heading="DIFFERENCE US", numeric=True, wide=True),
    Column(field="why", shrink=10, drop=1),
)
NODE_CHECK_COLUMNS = (
    Column(field="node", shrink=8),
    Column(field="verdict", state=True, shown=_verdict),
    Column(field="why", shrink=10, drop=1),
)

ARCHIVE_COLUMNS = (
    Column(field="day"),
    Column(field="kind"),
    Column(field="rows", numeric=True),
    Column(field="bytes", numeric=True),
    Column(field="digest", wide=True),
)


@click.group("usage", invoke_without_command=True)
@click.pass_context
def usage_command(context: click.Context) -> None:
    """Show use and cost from the ledger; without a command, the bill of the present month.

    \b
    Examples:
      hypercast usage
      hypercast usage summary --since 24h
      hypercast usage report --by tenant,day -o csv
      hypercast usage show req-4f1c…
    """
    if context.invoked_subcommand is None:
        context.invoke(bill)


usage_command.add_command(bill)
usage_command.add_command(export)


@usage_command.command("report")
@click.option(
    "--by", default=",".join(DEFAULT_BY), show_default=True, help=f"Group by these: {', '.join(PROPERTIES)}."
)
@period_options
@click.option("--key", help="Only requests made with the key of this id.")
@report_output_options
@client_options
def report(by: str, key: str | None, form: str, file: Path | None, client: Client, **period: Any) -> None:
    """Show requests, tokens, GPU time and cost by function and tenant, or by other properties.

    JSON, CSV and Parquet have costs in billionths of the currency's unit (`cost_nanos`).

    \b
    Examples:
      hypercast usage report
      hypercast usage report --by tenant,day --since 7d -o csv
    """
    parameters = query(by=by, **period, key=key)
    answer = client.json("GET", "/admin/usage/report", params=parameters)
    groups = [name.strip() for name in by.split(",")]
    rows = answer["rows"]
    if form in ("table", "wide"):
        rows = with_total(rows, groups[0], answer["currency"])
    uncut = ("hour", "day", "version", "status", "start_kind")
    of_groups = [Column(field=name, shrink=0 if name in uncut else 6) for name in groups]
    columns = (*of_groups, *SUM_COLUMNS)
    emit_report(rows, columns, (*groups, *COLUMNS), form, file)


@usage_command.command("summary")
@period_options
@output_option
@client_options
def summary(form: str, client: Client, **period: Any) -> None:
    """Show requests, GPU time, latency and cost of a period, by function and tenant.

    \b
    Examples:
      hypercast usage summary --since 24h
      hypercast usage summary --function tiny-coder -o wide
    """
    parameters = query(**period)
    rows = client.json("GET", "/admin/usage/summary", params=parameters)["rows"]
    if form in ("table", "wide") and len(rows) > 1:
        rows += totals(rows)
    emit_rows(rows, SUMMARY_COLUMNS, SUMMARY_FIELDS, form)


@usage_command.command("show")
@click.argument("request_id")
@output_option
@client_options
def show(request_id: str, form: str, client: Client) -> None:
    """Show the record of one request, by the id in its x-request-id header.

    JSON and CSV are the record as it is in the ledger, with times in Unix seconds.

    \b
    Examples:
      hypercast usage show req-4f1c…
      hypercast usage show req-4f1c… -o json
    """
    record = client.json("GET", f"/admin/usage/show/{segment(request_id)}")
    if form in ("json", "csv"):
        emit_record(record, form, as_is=True)
        return
    write_fields(shown_record(record))
    slices = record.get("gpu", [])
    if slices:
        write("\n")
        emit_rows(slices, SLICE_COLUMNS, (), form)


def shown_record(record: Row) -> list[tuple[str, str]]:
    """Return the labelled values of a request's record."""
    return [
        ("Request", record["request_id"]),
        *([("Client id", record["client_request_id"])] if record.get("client_request_id") else []),
        ("Status", record["status"]),
        ("Function", f"{record['function']}:{record['version']}"),
        ("Tenant", record["tenant"]),
        ("Key", record["key_id"]),
        ("Node", f"{record['node']} ({record['gpu_count']} x {record['gpu_type']})"),
        ("Start", record["start_kind"]),
        ("Received", utc_ms(record["received_at"])),
        ("Started", utc_ms(record["started_at"])),
        ("Ended", utc_ms(record["ended_at"])),
        (
            "Time",
            f"{record['queue_ms']} ms queued, {record['load_ms']} ms loading, {record['exec_ms']} ms running",
        ),
        ("Tokens", f"{record['prompt_tokens']} in the prompt, {record['completion_tokens']} generated"),
        ("GPU time", f"{record['billed_gpu_ms']} ms billed"),
        (
            "Cost",
            f"{money(record['cost_nanos'], record.get('currency') or 'USD')} (price {record['rate_id']})",
        ),
    ]


@usage_command.command("check")
@click.option(
    "--wait", type=DURATION, default=0.0, help="Repeat for at most this long, until all is settled."
)
@time_options
@output_option
@client_options
def check(wait: float, since: float | None, until: float | None, form: str, client: Client) -> None:
    """Audit the ledger: compare metered GPU time with billed GPU time.

    Exits with 1 if they are proven to differ. "Not yet settled" are instances with requests in flight, or
    with time that their node has yet to record (at most its --meter-interval): use --wait. What is
    "unproven" adds up, but part of the proof is outside the requested time.

    \b
    Examples:
      hypercast usage check
      hypercast usage check --since 24h --wait 90s
    """
    parameters = query(since=since, until=until)
    found = checked(client, parameters, time.monotonic() + wait)
    if form in ("json", "csv"):
        emit_record(found, form)
    else:
        verdict = VERDICTS.get(found["verdict"], found["verdict"])
        write(
            f"{coloured(verdict) if colours_wanted() else verdict}: {found['requests']} requests on "
            f"{found['instances_checked']} instances of {found['nodes_checked']} nodes\n"
        )
        if found["instances"]:
            emit_rows(found["instances"], CHECK_COLUMNS, (), form)
        if found["nodes"]:
            emit_rows(found["nodes"], NODE_CHECK_COLUMNS, (), form)
    if found["verdict"] == "wrong":
        raise CliError("the ledger does not add up")


def checked(client: Client, parameters: dict[str, object], until_s: float) -> dict[str, Any]:
    """Return the audit, repeated until it is settled or the time is over."""
    while True:
        found: dict[str, Any] = client.json("GET", "/admin/usage/check", params=parameters)
        left_s = until_s - time.monotonic()
        if found["verdict"] in ("exact", "unproven") or left_s <= 0:
            return found
        time.sleep(min(CHECK_PAUSE_S, left_s))


@usage_command.command("archive")
@click.option("--before", type=MOMENT, help="Only days (UTC) that ended by then.  [default: all closed days]")
@click.option("--list", "listed", is_flag=True, help="Archive nothing: show the files of the archive.")
@output_option
@client_options
def archive(before: float | None, listed: bool, form: str, client: Client) -> None:
    """Move closed days of the ledger from Redis to the archive, as the gateway does every day.

    A day is closed an hour after its end (UTC). Its records, GPU intervals and lost calls become Parquet
    files in the store; sums stay in Redis, and all reports read both. It may be interrupted and repeated.

    \b
    Examples:
      hypercast usage archive
      hypercast usage archive --before 2026-11-01
      hypercast usage archive --list -o csv
    """
    if listed:
        files = client.json("GET", "/admin/usage/archive")["files"]
    else:
        files = []
        with row_meter("archiving rows") as meter:
            for event in events(client, "/admin/usage/archive", query(before=before)):
                if "total" in event:
                    meter(event["moved"], event["total"])
                if "file" in event:
                    files.append(event["file"])
        note(f"{sum(file['rows'] for file in files)} rows archived")
    emit_rows(files, ARCHIVE_COLUMNS, [column.field for column in ARCHIVE_COLUMNS], form)


@usage_command.command("delete")
@click.option("--tenant", required=True, help="The tenant to delete.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@output_option
@client_options
def delete(tenant: str, yes: bool, form: str, client: Client) -> None:
    """Delete a tenant's data from the ledger, in Redis and the archive; all sums stay.

    Its requests get a random alias in place of the tenant and its key ids, and lose the ids that its clients
    gave them. The tenant's keys must be revoked first. It cannot be undone; it may be repeated.

    \b
    Examples:
      hypercast usage delete --tenant acme
      hypercast usage delete --tenant acme --yes -o json
    """
    if not yes and not sys.stdin.isatty():
        raise UsageError(f"cannot ask for confirmation without a terminal: add --yes to delete {tenant}")
    if not yes and not click.confirm(f"Delete all data of tenant {tenant} from the ledger?", err=True):
        raise click.Abort
    done: dict[str, Any] = {}
    with waiting(f"deleting {tenant}"):
        for event in events(client, "/admin/usage/delete", {"tenant": tenant}):
            done = event
    note(f"{tenant} is deleted from {done['changed']} requests")
    record = {"tenant": tenant, "alias": done["alias"], "requests": done["changed"]}
    if form in ("json", "csv"):
        emit_record(record, form)


def events(client: Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a stream that ends with `done`. Raises CliError for its `error` line."""
    event: dict[str, Any] = {}
    with client.stream("POST", path, json=body) as response:
        for text in response.iter_lines():
            event = json.loads(text) if text.strip() else {}
            if "error" in event:
                raise CliError(event["error"]["message"])
            yield event
    if not event.get("done"):
        raise CliError("the gateway ended before it was done: repeat the command")


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row of sums per currency."""
    found = []
    for currency in sorted({row["currency"] for row in rows}):
        of_currency = [row for row in rows if row["currency"] == currency]
        sums = {name: sum(row[name] for row in of_currency) for name in _SUMS}
        found.append({"function": "total", "currency": currency, **sums})
    return found
