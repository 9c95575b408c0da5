"""`jobs`: predictions and batches."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cli.client import Client, segment
from cli.commands.invoke import print_result
from cli.completion import job_ids
from cli.errors import MissingError, UsageError
from cli.exports import export_target
from cli.jobs import (
    check_succeeded,
    described,
    has_ended,
    is_batch,
    listed,
    path_of,
    wait_for,
)
from cli.options import SECONDS, client_options, output_option, text_option, watch_option
from cli.output import emit_record, emit_rows, render
from cli.progress import note
from cli.refresh import REFRESH_S, Frame, redraw
from cli.tables import Column
from cli.values import age_of

FIELDS = (
    *("id", "kind", "calls", "status", "done", "failed", "total"),
    *("created_at", "started_at", "ended_at", "webhook_status"),
)
COLUMNS = (
    Column(field="id", heading="ID"),
    Column(field="kind", drop=2),
    Column(field="calls", heading="FUNCTION", shrink=8),
    Column(field="status", state=True),
    Column(field="done", numeric=True, drop=1, shown=lambda row: f"{row['done']}/{row['total']}"),
    Column(field="failed", numeric=True, drop=3),
    Column(field="created_at", heading="AGE", numeric=True, shown=lambda row: age_of(row["created_at"])),
    Column(field="started_at", heading="STARTED", wide=True),
    Column(field="ended_at", heading="ENDED", wide=True),
    Column(field="webhook_status", heading="WEBHOOK", drop=4),
)


@click.group("jobs")
def jobs_command() -> None:
    """List, show, wait for and cancel predictions and batches: calls that run in the background.

    \b
    Examples:
      hypercast predict tiny-coder -p 'def main():'
      hypercast batch calls.jsonl
      hypercast jobs list
      hypercast jobs wait ID
    """


@jobs_command.command("list")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Most rows.")
@watch_option
@output_option
@client_options
def list_jobs(limit: int, watch: bool, form: str, client: Client) -> None:
    """List the predictions and batches of the key's tenant, the latest first.

    \b
    Examples:
      hypercast jobs list
      hypercast jobs list --watch
      hypercast jobs list --limit 100 -o json
    """
    if watch:
        redraw(_frames(client, limit, form))
    else:
        emit_rows(listed(client, limit), COLUMNS, FIELDS, form)


def _frames(client: Client, limit: int, form: str) -> Iterator[Frame]:
    while True:
        yield Frame(text=render(listed(client, limit), COLUMNS, FIELDS, form))
        time.sleep(REFRESH_S)


@jobs_command.command("show")
@click.argument("job_id", metavar="ID", shell_complete=job_ids)
@output_option
@client_options
def show(job_id: str, form: str, client: Client) -> None:
    """Show a prediction or a batch.

    \b
    Examples:
      hypercast jobs show order-4711
      hypercast jobs show order-4711 -o json
    """
    job = client.json("GET", path_of(job_id))
    emit_record(job, form, list(described(job)), as_is=True)


@jobs_command.command("wait")
@click.argument("job_id", metavar="ID", shell_complete=job_ids)
@click.option("--timeout", type=SECONDS, help="Seconds to wait; it runs on after them.  [default: no end]")
@output_option
@client_options
def wait(job_id: str, timeout: float | None, form: str, client: Client) -> None:
    """Wait until a prediction or a batch has ended, and show it; 1 unless it ended well.

    Ctrl-C ends the wait alone: it runs on.

    \b
    Examples:
      hypercast jobs wait order-4711
      hypercast jobs wait batch_0123456789abcdef01234567 --timeout 3600
    """
    job = wait_for(client, client.json("GET", path_of(job_id)), timeout, time.monotonic)
    emit_record(job, form, list(described(job)), as_is=True)
    check_succeeded(job)


@jobs_command.command("cancel")
@click.argument("job_id", metavar="ID", shell_complete=job_ids)
@output_option
@client_options
def cancel(job_id: str, form: str, client: Client) -> None:
    """Cancel a prediction, or what of a batch has not run.

    \b
    Examples:
      hypercast jobs cancel order-4711
    """
    job = client.json("POST", f"{path_of(job_id)}/cancel")
    if form in ("json", "csv"):
        emit_record(job, form, as_is=True)
        return
    ended = f"{job_id}: {job['status']}" if has_ended(job) else f"{job_id}: being cancelled"
    note(ended)


@jobs_command.command("result")
@click.argument("job_id", metavar="ID", shell_complete=job_ids)
@click.option("--errors", is_flag=True, help="The lines of a batch that failed.")
@click.option(
    "--file", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of stdout."
)
@text_option("the whole output of a prediction")
@client_options
def result(job_id: str, errors: bool, file: Path | None, form: str, client: Client) -> None:
    """Print the output of a prediction, or the lines of a batch's results.

    \b
    Examples:
      hypercast jobs result order-4711
      hypercast jobs result batch_0123456789abcdef01234567 --file results.jsonl
      hypercast jobs result batch_0123456789abcdef01234567 --errors
    """
    job = client.json("GET", path_of(job_id))
    if is_batch(job_id):
        if not has_ended(job):
            check_succeeded(job)
        save_result(client, job, file, errors=errors)
        return
    if errors or file is not None:
        raise UsageError("--errors and --file are for batches")
    check_succeeded(job)
    print_result(job["output"], raw=form == "json")


def save_result(client: Client, batch: dict[str, Any], file: Path | None, *, errors: bool) -> int:
    """Write the results of a batch to a file, or stdout; return the bytes. Raises MissingError for none."""
    found = batch["error_file_id" if errors else "output_file_id"]
    if found is None:
        check_succeeded(batch)
        raise MissingError(f"{batch['id']} has no lines that {'failed' if errors else 'succeeded'}")
    nbytes = 0
    with (
        export_target(file, binary=False) as out,
        client.stream("GET", f"/v1/files/{segment(found)}/content") as response,
    ):
        for chunk in response.iter_bytes():
            nbytes += len(chunk)
            out.write(chunk)
    return nbytes
