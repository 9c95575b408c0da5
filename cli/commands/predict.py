"""`predict`: a call that runs in the background."""

import time
from pathlib import Path
from typing import Any

import click

from cli.call_input import call_body, call_options, wrong_input
from cli.client import Client, segment
from cli.commands.invoke import print_result
from cli.completion import function_names
from cli.errors import UsageError
from cli.jobs import check_succeeded, described, wait_for
from cli.options import SECONDS, client_options, output_option, query
from cli.output import emit_record, write


@click.command("predict")
@click.argument("name", metavar="NAME[:VERSION]", shell_complete=function_names)
@call_options
@click.option("--id", "job_id", metavar="ID", help="Id of the prediction: sent twice, it runs once.")
@click.option("--webhook", metavar="URL", help="Where its end is reported.")
@click.option("--wait", is_flag=True, help="Print the result once it has ended; 1 if it failed.")
@click.option("--timeout", type=SECONDS, help="Seconds to wait; it runs on after them.  [default: no end]")
@output_option
@client_options
def predict_command(
    name: str,
    prompt: str | None,
    text: str | None,
    image: Path | None,
    data: str | None,
    job_id: str | None,
    webhook: str | None,
    wait: bool,
    timeout: float | None,
    form: str,
    client: Client,
    **sampling: float | None,
) -> None:
    """Queue a call of a function, which runs in the background, and print its id.

    \b
    Examples:
      hypercast predict tiny-coder -p 'def main():' -n 64
      hypercast predict tiny-coder -p 'def main():' -n 64 --wait
      hypercast predict echo -d @body.json --id order-4711 --webhook https://example.com/done
      hypercast jobs result order-4711
    """
    if timeout is not None and not wait:
        raise UsageError("--timeout is for --wait")
    body = query(model=name, webhook=webhook, input=call_body(prompt, text, image, data, sampling))
    prefer = {"prefer": "respond-async"}
    try:
        job: Any = (
            client.json("POST", "/predictions", json=body, headers=prefer)
            if job_id is None
            else client.json("PUT", f"/predictions/{segment(job_id)}", json=body, headers=prefer)
        )
    except UsageError as exc:
        raise exc if data is not None else wrong_input(exc) from exc
    if wait:
        job = wait_for(client, job, timeout, time.monotonic)
    if form in ("json", "csv"):
        emit_record(job, form, as_is=True)
    elif form == "wide":
        emit_record(job, form, list(described(job)))
    elif not wait:
        write(f"{job['id']}\n")
    if not wait:
        return
    check_succeeded(job)
    if form == "table":
        print_result(job["output"], raw=data is not None)
