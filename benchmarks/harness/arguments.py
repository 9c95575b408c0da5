"""The command line of a benchmark, and the values that several of them take there."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from registry.arguments import argument
from registry.sizes import parse_rate, parse_size

T = TypeVar("T")

size = argument(parse_size)  # bytes, as in 64MiB
rate = argument(parse_rate)  # bytes a second, as in 200mbit


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def listed(of: Callable[[str], T], allowed: Sequence[T] = (), least: int = 1) -> Callable[[str], list[T]]:
    """A parser of values with commas between; each counts once."""

    def parse_list(text: str) -> list[T]:
        found = list(dict.fromkeys(of(word.strip()) for word in text.split(",") if word.strip()))
        unknown = [value for value in found if allowed and value not in allowed]
        if unknown:
            known = ", ".join(map(str, allowed))
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]}; use one or several of {known}")
        if len(found) < least:
            raise argparse.ArgumentTypeError(f"must name {least} or more")
        return found

    return parse_list


def at_least(least: int) -> Callable[[str], int]:
    def parse_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {value}")
        return value

    parse_number.__name__ = "number"  # argparse names it where the text is none
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
    """Tell who watches; what is measured goes to the standard output."""
    print(line, file=sys.stderr, flush=True)
