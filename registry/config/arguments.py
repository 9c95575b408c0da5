"""Argparse types over the registry's parsers."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from registry.errors import InvalidRecord

T = TypeVar("T")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return `parse` as an argparse type: argparse then shows why a value is bad."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except InvalidRecord as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
