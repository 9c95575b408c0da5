"""Flag values of the programs, parsed by the registry's functions."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from registry.errors import InvalidRecord

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as an argparse type: argparse then shows why a value is bad."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except InvalidRecord as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def number(least: int, most: int) -> Callable[[str], int]:
    """An argparse type for whole numbers with bounds."""

    def convert(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return convert


tcp_port = number(0, 65535)
