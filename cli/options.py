"""Options and value types that several commands share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from cli.client import Client
from cli.output import FORMATS
from cli.settings import resolve
from registry.durations import parse_duration
from registry.errors import InvalidRecord
from registry.function import check_name
from registry.sizes import parse_rate, parse_size

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


DURATION = _Parsed("duration", parse_duration)
SIZE = _Parsed("size", parse_size)
RATE = _Parsed("rate", parse_rate)
NAME = _Parsed("name", check_name)


def client_options(command: F) -> F:
    """`--url` and `--api-key`, passed on as `client_settings` by `connect`."""
    command = click.option("--api-key", help="API key (or HYPERCAST_API_KEY).")(command)
    return click.option("--url", help="The gateway's address (or HYPERCAST_URL).")(command)


def output_option(command: F) -> F:
    return click.option(
        "-o", "--output", "form", type=click.Choice(FORMATS), default="table", help="How to print data."
    )(command)


def connect(url: str | None, api_key: str | None, timeout_s: float = 600.0) -> Client:
    return Client(resolve(url, api_key), timeout_s)
