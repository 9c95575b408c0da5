"""`invoke`: call a function from the shell."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import click
import httpx2

from cli.client import Client, segment, server_events
from cli.errors import CliError, MissingError, UsageError
from cli.options import SECONDS, client_options, connect
from cli.progress import StageLine, note


@click.command("invoke")
@click.argument("name")
@click.option("-p", "--prompt", help="Text to continue (or - for stdin).")
@click.option("-i", "--input", "text", help="Text to embed.")
@click.option("--image", type=click.Path(path_type=Path), help="An image file to classify.")
@click.option("-d", "--data", help="A JSON body (or @FILE, or - for stdin).")
@click.option("-n", "--max-tokens", type=click.IntRange(1), help="At most so many new tokens.")
@click.option("-t", "--temperature", type=float, help="0 is greedy.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stream", is_flag=True, help="Print text as it comes.")
@click.option("-v", "--verbose", is_flag=True, help="Show the response's start kind and timing.")
@click.option("--timeout", type=SECONDS, default=600.0, show_default=True, help="Seconds without an answer.")
@client_options
def invoke_command(
    name: str,
    prompt: str | None,
    text: str | None,
    image: Path | None,
    data: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    stream: bool,
    verbose: bool,
    timeout: float,
    url: str | None,
    api_key: str | None,
) -> None:
    """Call a function and print its answer.

    \b
    Examples:
      hypercast invoke tiny-coder -p 'def main():' -n 64 --stream
      hypercast invoke embed -i 'a sentence'
      hypercast invoke classify --image cat.png
      hypercast invoke echo -d '{"hello": 1}'
    """
    given = [value for value in (prompt, text, image, data) if value is not None]
    if len(given) != 1:
        raise UsageError("give exactly one of --prompt, --input, --image and --data")
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
    for key, value in (("max_tokens", max_tokens), ("temperature", temperature), ("seed", seed)):
        if value is not None:
            body[key] = value
    refuse_unsendable(body)
    with connect(url, api_key, timeout) as client:
        if body.get("stream"):
            print_stream(client, f"/functions/{segment(name)}/invoke", body, verbose)
        else:
            print_answer(client, f"/functions/{segment(name)}/invoke", body, verbose, raw=data is not None)


def parse_body(data: str) -> dict[str, Any]:
    """The JSON object of `--data`: itself, `@FILE` or `-`."""
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
    return decoded("stdin", sys.stdin.buffer.read())


def decoded(where: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise UsageError(f"{where} is not UTF-8 text: {exc.reason} at byte {exc.start}") from exc


def refuse_unsendable(body: dict[str, Any]) -> None:
    """Of what a shell can give, JSON has no NaN, no infinity and no bytes that are not UTF-8."""
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as exc:
        raise UsageError("what is to be sent is not UTF-8 text") from exc
    except ValueError as exc:
        raise UsageError("NaN and infinity cannot be sent: JSON has no such numbers") from exc


def print_answer(client: Client, path: str, body: dict[str, Any], verbose: bool, *, raw: bool) -> None:
    """The text of a generation; JSON for everything else, and whenever JSON was given (`raw`)."""
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
    for header in ("x-request-id", "x-function-version", "x-start-kind", "server-timing"):
        if header in response.headers:
            note(f"{header}: {response.headers[header]}")


def print_stream(client: Client, path: str, body: dict[str, Any], verbose: bool) -> None:
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
            print_event(text)
    click.echo()


def print_event(text: str) -> None:
    event = json.loads(text)
    if isinstance(event, dict) and "error" in event:
        raise CliError(str(event["error"]["message"]))
    if isinstance(event, dict) and "choices" in event:
        for choice in event["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            click.echo(piece, nl=False)
    else:
        click.echo(text)
