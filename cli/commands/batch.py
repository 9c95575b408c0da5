"""`batch`: the calls of a file, which run in the background."""

import json
import time
from pathlib import Path

import click

from cli.client import Client
from cli.commands.jobs import save_result
from cli.errors import MissingError, UsageError
from cli.jobs import check_succeeded, described, wait_for
from cli.options import SECONDS, client_options, output_option, query
from cli.output import emit_record, write
from cli.progress import note, waiting
from cli.values import human_bytes

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_MAX_LINE_BYTES = 8 << 20


@click.command("batch")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--endpoint", type=click.Choice(ENDPOINTS), help="What its lines call.  [default: as its first line]"
)
@click.option("--webhook", metavar="URL", help="Where its end is reported.")
@click.option("--wait", is_flag=True, help="Return once it has ended; 1 unless it is completed.")
@click.option("--timeout", type=SECONDS, help="Seconds to wait; it runs on after them.  [default: no end]")
@click.option(
    "--result",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Wait, and write the results to this file, those that failed to FILE.errors.",
)
@output_option
@client_options
def batch_command(
    file: Path,
    endpoint: str | None,
    webhook: str | None,
    wait: bool,
    timeout: float | None,
    result: Path | None,
    form: str,
    client: Client,
) -> None:
    """Upload a file of calls, run them within a day, and print the id of the batch.

    A line of the file is {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {…}}.

    \b
    Examples:
      hypercast batch calls.jsonl
      hypercast batch calls.jsonl --result results.jsonl
      hypercast batch calls.jsonl --webhook https://example.com/done
      hypercast jobs wait batch_0123456789abcdef01234567
    """
    wait = wait or result is not None
    if timeout is not None and not wait:
        raise UsageError("--timeout is for --wait or --result")
    endpoint = endpoint or endpoint_of(file)
    nbytes = file.stat().st_size
    with file.open("rb") as content, waiting(f"uploading {file.name}, {human_bytes(nbytes)}"):
        files = {"file": (file.name, content, "application/jsonl")}
        uploaded = client.json("POST", "/v1/files", files=files, data={"purpose": "batch"})
    body = query(input_file_id=uploaded["id"], endpoint=endpoint, completion_window="24h", webhook=webhook)
    job = client.json("POST", "/v1/batches", json=body)
    if wait:
        job = wait_for(client, job, timeout, time.monotonic)
    if form in ("json", "csv"):
        emit_record(job, form, as_is=True)
    elif form == "wide" or wait:
        emit_record(job, form, list(described(job)))
    else:
        write(f"{job['id']}\n")
    if result is not None:
        for errors, target in ((False, result), (True, result.with_name(f"{result.name}.errors"))):
            if job["error_file_id" if errors else "output_file_id"] is not None:
                note(f"{target}: {human_bytes(save_result(client, job, target, errors=errors))}")
    if wait:
        check_succeeded(job)


def endpoint_of(file: Path) -> str:
    """Return what the first line of a file of calls calls. Raises UsageError, MissingError."""
    try:
        with file.open("rb") as content:
            line = content.readline(_MAX_LINE_BYTES)
    except OSError as exc:
        raise MissingError(f"cannot read {file}: {exc.strerror}") from exc
    try:
        url = json.loads(line)["url"]
    except (ValueError, KeyError, TypeError):
        url = None
    if url not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise UsageError(
            f'the first line of {file} has no "url" of {known}: correct it, or name the --endpoint'
        )
    return str(url)
