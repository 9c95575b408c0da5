"""`invoke`: call a function from the shell."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import click
import httpx2

from cli.client import Client, segment, server_events
from cli.completion import function_names
from cli.errors import CliError, MissingError, UsageError
from cli.options import SECONDS, client_options
from cli.output import emit_record, write
from cli.progress import StageLine, note
from cli.tables import Row
from cli.values import money

# The options for the fields which the gateway says that a function needs.
OPTIONS = {
    "'prompt' or 'messages'": "--prompt TEXT",
    "'input'": "--input TEXT",
    "'image'": "--image FILE",
    "'text' or 'image'": """--image FILE or --data '{"text": …}'""",
}

_UNITS = {
    "requests": "{} request",
    "prompt-tokens": "{} prompt tokens",
    "completion-tokens": "up to {} generated tokens",
    "gpu-time": "about {} ms of GPU time",
}


@click.command("invoke")
@click.argument("name", shell_complete=function_names)
@click.option("-p", "--prompt", help="Text to continue (-: stdin).")
@click.option("-i", "--input", "text", help="Text to embed.")
@click.option("--image", type=click.Path(path_type=Path), help="Image file to classify.")
@click.option("-d", "--data", help="Request body as JSON (@FILE: from a file; -: stdin).")
@click.option("-n", "--max-tokens", type=click.IntRange(1), metavar="N", help="Most tokens to generate.")
@click.option("-t", "--temperature", type=float, help="Sampling temperature (0: greedy).")
@click.option("--seed", type=int, help="Seed for repeatable sampling.")
@click.option("--stream", is_flag=True, help="Print the text while it is generated.")
@click.option("--quote", is_flag=True, help="Run nothing: print what the call may cost.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Show request id, version, start kind and timing on stderr."
)
@click.option(
    "--timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds to wait without a response."
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="json: the whole response (with --stream: one event per line).",
)
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
    given = [value for value in (prompt, text, image, data) if value is not None]
    if len(given) != 1:
        raise UsageError("name exactly one of --prompt, --input, --image and --data")
    body: dict[str, Any]
    if prompt is not None:
        body = {"prompt": read_stdin() if prompt == "-" else prompt, "stream": stream}
    elif text is not None:
        body = {"input": text}
    elif image is not None:
        try:
            body = {"image": base64.b64encode(image.read_bytes()).decode()}
        except OSError as exc:
            raise MissingError(f"cannot read {image}: {exc.strerror}") from exc
    else:
        body = parse_body(data or "")
        if stream:
            body["stream"] = True
    body |= {name: value for name, value in sampling.items() if value is not None}
    refuse_unsendable(body)
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


def wrong_input(error: UsageError) -> UsageError:
    """Return the gateway's error about a missing input with options in place of fields."""
    start, _, fields = str(error).partition(": use ")
    return UsageError(f"{start}: use {OPTIONS[fields]}") if fields in OPTIONS else error


def parse_body(data: str) -> dict[str, Any]:
    """Return the JSON object of `--data`: its own text, of a file (`@FILE`) or of stdin (`-`)."""
    if data == "-":
        data = read_stdin()
    elif data.startswith("@"):
        try:
            data = decoded(data[1:], Path(data[1:]).read_bytes())
        except OSError as exc:
            raise MissingError(f"cannot read {data[1:]}: {exc.strerror}") from exc
    try:
        body = json.loads(data)
    except json.JSONDecodeError as exc:
        raise UsageError(f"--data is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise UsageError("--data must be a JSON object")
    return body


def read_stdin() -> str:
    """Return the text on stdin."""
    return decoded("stdin", sys.stdin.buffer.read())


def decoded(where: str, data: bytes) -> str:
    """Return UTF-8 text. Raises UsageError."""
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise UsageError(f"{where} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def refuse_unsendable(body: dict[str, Any]) -> None:
    """Raise UsageError for what JSON cannot hold: NaN, infinity and bytes that are not UTF-8."""
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as exc:
        raise UsageError("the request is not UTF-8 text") from exc
    except ValueError as exc:
        raise UsageError("NaN and infinity cannot be sent: JSON does not have them") from exc


def print_answer(client: Client, path: str, body: dict[str, Any], verbose: bool, *, raw: bool) -> None:
    """Print the text of a generation; JSON for everything else, and where `raw` is set."""
    response = client.request("POST", path, json=body)
    if verbose:
        note_headers(response)
    answer = response.json()
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
