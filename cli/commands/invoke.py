"""`invoke`: call a function from the shell."""

import json
from pathlib import Path
from typing import Any

import click
import httpx2

from cli.call_input import call_body, call_options, wrong_input
from cli.client import Client, segment, server_events
from cli.completion import function_names
from cli.errors import CliError, UsageError
from cli.options import SECONDS, client_options, text_option
from cli.output import emit_record, write
from cli.progress import StageLine, note
from cli.tables import Row
from cli.values import money

_UNITS = {
    "requests": "{} request",
    "prompt-tokens": "{} prompt tokens",
    "completion-tokens": "up to {} generated tokens",
    "gpu-time": "about {} ms of GPU time",
}


@click.command("invoke")
@click.argument("name", shell_complete=function_names)
@call_options
@click.option("--stream", is_flag=True, help="Print the text while it is generated.")
@click.option("--quote", is_flag=True, help="Run nothing: print what the call may cost.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show request id, version, start kind and timing on stderr."
)
@click.option(
    "--timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds to wait without a response."
)
@text_option("the whole response (with --stream: one event per line)")
@client_options
def invoke_command(
    name: str,
    prompt: str | None,
    text: str | None,
    image: Path | None,
    data: str | None,
    stream: bool,
    quote: bool,
    verbose: bool,
    timeout: float,
    form: str,
    client: Client,
    **sampling: float | None,
) -> None:
    """Call a function and print its response.

    \b
    Examples:
      hypercast invoke tiny-coder -p 'def main():' -n 64 --stream
      hypercast invoke embed -i 'a sentence'
      hypercast invoke classify --image cat.png
      hypercast invoke echo -d '{"hello": 1}' -o json
      hypercast invoke tiny-coder -p 'def main():' -n 64 --quote
    """
    body = call_body(prompt, text, image, data, sampling)
    if stream:
        body["stream"] = True
    path = f"/functions/{segment(name)}/invoke"
    raw = form == "json" or (data is not None and not body.get("stream"))
    client.set_timeout(timeout)
    try:
        if quote:
            print_quote(client.json("POST", "/v1/quote", json={**body, "model": name}), form)
        elif body.get("stream"):
            print_stream(client, path, body, verbose, raw=raw)
        else:
            print_answer(client, path, body, verbose, raw=raw)
    except UsageError as exc:
        if data is not None:
            raise
        raise wrong_input(exc) from exc


def print_quote(quote: Row, form: str) -> None:
    """Print what a call may cost."""
    if form == "json":
        emit_record(quote, form)
        return
    parts = ", ".join(_UNITS[part["meter"]].format(part["quantity"]) for part in quote["parts"])
    shown = money(quote["cost_nanos"], quote["currency"])
    price = "free of charge" if quote["rate"] is None else f"price {quote['rate']}"
    write(f"{shown}: {parts} ({quote['gpu_time']}; {price})\n")


def print_answer(client: Client, path: str, body: dict[str, Any], verbose: bool, *, raw: bool) -> None:
    """Call a function and print what it returns."""
    response = client.request("POST", path, json=body)
    if verbose:
        note_headers(response)
    print_result(response.json(), raw=raw)


def print_result(answer: Any, *, raw: bool) -> None:
    """Print the text of a generation; JSON for everything else, and where `raw` is set."""
    generated = answer.get("choices") if isinstance(answer, dict) and not raw else None
    if generated and "text" in generated[0]:
        click.echo(generated[0]["text"])
    elif generated and "message" in generated[0]:
        click.echo(generated[0]["message"]["content"])
    else:
        click.echo(json.dumps(answer, indent=None, ensure_ascii=False))


def note_headers(response: httpx2.Response) -> None:
    """Show the headers that describe how a request was served."""
    for header in ("x-request-id", "x-function-version", "x-start-kind", "server-timing"):
        if header in response.headers:
            note(f"{header}: {response.headers[header]}")


def print_stream(client: Client, path: str, body: dict[str, Any], verbose: bool, *, raw: bool) -> None:
    """Print the text of a streamed generation; each event as a line of JSON where `raw` is set."""
    line = StageLine()
    with client.stream("POST", path, json=body) as response:
        if verbose:
            note_headers(response)
        for kind, text in server_events(response):
            if kind == "comment":
                stage, _, share = text.removeprefix("stage=").partition(" ")
                if text.startswith("stage=") and share.endswith("%"):
                    line.show(stage, float(share[:-1]) / 100)
                elif verbose:
                    note(text)
                continue
            if text == "[DONE]":
                break
            line.end()
            print_event(text, raw=raw)
    if not raw:
        click.echo()


def print_event(text: str, *, raw: bool) -> None:
    """Print one event. Raises CliError for one that reports an error."""
    event = json.loads(text)
    if isinstance(event, dict) and "error" in event:
        raise CliError(str(event["error"]["message"]))
    if isinstance(event, dict) and "choices" in event and not raw:
        for choice in event["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            click.echo(piece, nl=False)
    else:
        click.echo(text)
