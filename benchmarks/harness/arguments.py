"""Command-line parsing for benchmarks, and the value types that several of them accept."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from registry.errors import InvalidRecord
from registry.units.sizes import parse_rate, parse_size

UNLIMITED = "1024TiB"  # as the size of an option: more than any host has

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return `parse` as an argparse type: argparse then shows why a value is bad."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except InvalidRecord as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


size = argument(parse_size)  # 64MiB -> bytes
rate = argument(parse_rate)  # 200mbit -> bytes per second


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the description unchanged, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        unnamed = action.default in (None, False, "", argparse.SUPPRESS) or "default" in text
        return text if unnamed else f"{text} (default %(default)s)"


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the module's docstring, and the options' defaults."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=_HelpFormatter
    )


def benchmark_parser(module: str, description: str | None, *, plot: bool = False) -> argparse.ArgumentParser:
    """Return such a parser with --json and, where the benchmark draws, --plot."""
    parser = make_parser(module, description)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    if plot:
        parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    return parser


def comma_list(of: Callable[[str], T], allowed: Sequence[T] = (), least: int = 1) -> Callable[[str], list[T]]:
    """Return a parser of comma-separated values; duplicates are dropped."""

    def parse_list(text: str) -> list[T]:
        found = list(dict.fromkeys(of(word.strip()) for word in text.split(",") if word.strip()))
        unknown = [value for value in found if allowed and value not in allowed]
        if unknown:
            known = ", ".join(map(str, allowed))
            raise argparse.ArgumentTypeError(f"unknown value {unknown[0]}: choose one or more of {known}")
        if len(found) < least:
            raise argparse.ArgumentTypeError(f"give at least {least} value(s)")
        return found

    return parse_list


def some_of(names: Iterable[str], least: int = 1) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names among these."""
    return comma_list(str, tuple(names), least)


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers not below `least`."""

    def parse_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {value}")
        return value

    parse_number.__name__ = "number"  # shown by argparse for text that is no number
    return parse_number


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, not {text}")
    return value


def say(line: str) -> None:
    """Print a progress line to stderr; results go to stdout."""
    print(line, file=sys.stderr, flush=True)
