"""Command-line flags: the types of their values, and what a flag of a process is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import click

from registry.errors import InvalidRecord
from registry.units.durations import parse_duration
from registry.units.sizes import parse_rate, parse_size


class Parsed(click.ParamType):
    """A value parsed by a function whose InvalidRecord becomes a usage error."""

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


def whole_number(name: str, minimum: int, maximum: int) -> Parsed:
    """Return the type of a whole number in `[minimum, maximum]`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and minimum <= int(text) <= maximum):
            raise InvalidRecord(f"{text!r} is not a number from {minimum} to {maximum}")
        return int(text)

    return Parsed(name, parse)


def _lease(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise InvalidRecord(f"{text!r} is not between 0.1 and 3600")
    return seconds


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InvalidRecord(f"{text!r} is not between 0 and 1")
    return share


def _interval(text: str) -> float:
    seconds = parse_duration(text)
    if not 0.1 <= seconds <= 86_400:
        raise InvalidRecord(f"{text} is not between 100ms and 24h")
    return seconds


DURATION = Parsed("duration", parse_duration)
INTERVAL = Parsed("duration", _interval)
LEASE = Parsed("seconds", _lease)
SIZE = Parsed("size", parse_size)
RATE = Parsed("rate", parse_rate)
SHARE = Parsed("share", _share)
PORT = whole_number("port", 0, 65535)
FILE = click.Path(path_type=Path)


class PlatformCommand(StrEnum):
    """A command whose flags fill Options."""

    UP = "up"
    GATEWAY = "gateway"
    INVOKER = "invoker"


@dataclass(frozen=True, slots=True)
class Flag:
    """The command line's side of a field of Options.

    `shown` is the default as the help shows it ("": as it is). `defaults` and `helps` are those of commands
    that differ; `required` are the commands that do not run without it.
    """

    name: str
    commands: Sequence[PlatformCommand]
    help: str
    type: click.ParamType | None = None
    shown: str = ""
    metavar: str | None = None
    required: Sequence[PlatformCommand] = ()
    defaults: Mapping[PlatformCommand, Any] = field(default_factory=dict)
    helps: Mapping[PlatformCommand, str] = field(default_factory=dict)


def flag(
    name: str,
    commands: Sequence[PlatformCommand],
    help: str,
    type: click.ParamType | None = None,
    *,
    default: Any = None,
    **more: Any,
) -> Any:
    """Return a field of Options with its flag; `default` may be text as on the command line, such as 30s."""
    if isinstance(default, str) and default:
        more = {"shown": default} | more
        default = default if type is None else type.convert(default, None, None)
    return field(default=default, metadata={"flag": Flag(name, commands, help, type, **more)})
