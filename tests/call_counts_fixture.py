"""Counts what a piece of code does, for tests that must not go by the clock."""

import sys
from collections.abc import Callable
from types import FrameType


def calls_made(work: Callable[[], object]) -> int:
    """How many calls of functions, in Python or C, `work` makes on this thread."""
    made = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made
