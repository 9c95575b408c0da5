"""The input of a call, as options and as a body: of `invoke` and `predict`."""

import base64
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from cli.errors import MissingError, UsageError

F = TypeVar("F", bound=Callable[..., Any])

# The options for the fields which the gateway says that a function needs.
OPTIONS = {
    "'prompt' or 'messages'": "--prompt TEXT",
    "'input'": "--input TEXT",
    "'image'": "--image FILE",
    "'text' or 'image'": """--image FILE or --data '{"text": …}'""",
}


def call_options(command: F) -> F:
    """Add `--prompt`, `--input`, `--image`, `--data` and those of sampling."""
    options = (
        click.option("-p", "--prompt", help="Text to continue (-: stdin)."),
        click.option("-i", "--input", "text", help="Text to embed."),
        click.option("--image", type=click.Path(path_type=Path), help="Image file to classify."),
        click.option("-d", "--data", help="Request body as JSON (@FILE: from a file; -: stdin)."),
        click.option(
            "-n", "--max-tokens", type=click.IntRange(1), metavar="N", help="Most tokens to generate."
        ),
        click.option("-t", "--temperature", type=float, help="Sampling temperature (0: greedy)."),
        click.option("--seed", type=int, help="Seed for repeatable sampling."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def call_body(
    prompt: str | None, text: str | None, image: Path | None, data: str | None, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a call. Raises UsageError for none, several, or what cannot be sent."""
    given = [value for value in (prompt, text, image, data) if value is not None]
    if len(given) != 1:
        raise UsageError("name exactly one of --prompt, --input, --image and --data")
    body: dict[str, Any]
    if prompt is not None:
        body = {"prompt": read_stdin() if prompt == "-" else prompt}
    elif text is not None:
        body = {"input": text}
    elif image is not None:
        try:
            body = {"image": base64.b64encode(image.read_bytes()).decode()}
        except OSError as exc:
            raise MissingError(f"cannot read {image}: {exc.strerror}") from exc
    else:
        body = parse_body(data or "")
    body |= {name: value for name, value in sampling.items() if value is not None}
    refuse_unsendable(body)
    return body


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
