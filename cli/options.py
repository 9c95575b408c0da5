"""Options and value types that several commands share."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cli.client import Client
from cli.output import FORMATS, REPORT_FORMATS
from cli.settings import resolve
from registry.durations import parse_duration
from registry.errors import InvalidRecord
from registry.function import check_name
from registry.live import Live
from registry.moments import parse_moment
from registry.sizes import parse_rate, parse_size

_MOST_SECONDS = 2e6  # a socket takes no timeout of 25 days

F = TypeVar("F", bound=Callable[..., Any])


class _Parsed(click.ParamType):
    """A value parsed by one of the registry's functions; its error text goes to the user."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidRecord as exc:
            self.fail(str(exc), param, ctx)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_SECONDS:
        raise InvalidRecord(f"bad number of seconds {text!r}: use one above 0, as 30 or 0.5")
    return seconds


DURATION = _Parsed("duration", parse_duration)
MOMENT = _Parsed("time", lambda text: parse_moment(text, time.time()))
SIZE = _Parsed("size", parse_size)
RATE = _Parsed("rate", parse_rate)
NAME = _Parsed("name", check_name)
SECONDS = _Parsed("seconds", _seconds)
LIVE = click.Choice([live.value for live in Live])


def client_options(command: F) -> F:
    """`--url` and `--api-key`, passed on as `client_settings` by `connect`."""
    command = click.option("--api-key", help="API key (or HYPERCAST_API_KEY).")(command)
    return click.option("--url", help="The gateway's address (or HYPERCAST_URL).")(command)


def output_option(command: F) -> F:
    return click.option(
        "-o", "--output", "form", type=click.Choice(FORMATS), default="table", help="How to print data."
    )(command)


def report_output_options(command: F) -> F:
    """`-o` with Parquet, and `--file`."""
    command = click.option(
        "--file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write to this file instead of stdout.",
    )(command)
    return click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(REPORT_FORMATS),
        default="table",
        help="How to print data.",
    )(command)


def period_options(command: F) -> F:
    """`--since`, `--until`, `--function` and `--tenant`."""
    command = click.option("--tenant", help="Only this tenant.")(command)
    command = click.option("--function", help="Only this function.")(command)
    return time_options(command)


def time_options(command: F) -> F:
    """`--since` and `--until`."""
    command = click.option("--until", type=MOMENT, help="Only before this time.")(command)
    return click.option(
        "--since",
        type=MOMENT,
        help="Only from this time on: 24h (ago), or a UTC time like 2026-11-21T08:00Z.",
    )(command)


def query(**values: object) -> dict[str, object]:
    """A query of the values that are given."""
    return {name: value for name, value in values.items() if value is not None}


def connect(url: str | None, api_key: str | None, timeout_s: float = 600.0) -> Client:
    return Client(resolve(url, api_key), timeout_s)
