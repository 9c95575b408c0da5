"""Output that refreshes every second."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

REFRESH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The text to show now; `last` where it will not change any more."""

    text: str
    last: bool = False


def redraw(frame: Callable[[], Frame]) -> None:
    """Show frames until the last: in place on a terminal, else one below the other."""
    if not sys.stdout.isatty():
        for one in _frames(frame):
            sys.stdout.write(one.text + "\n")
            sys.stdout.flush()
        return
    with Live(console=Console(), auto_refresh=False) as live:
        for one in _frames(frame):
            text = Text.from_ansi(one.text, no_wrap=True, overflow="ellipsis")
            live.update(text, refresh=True)


def _frames(frame: Callable[[], Frame]) -> Iterator[Frame]:
    while True:
        one = frame()
        yield one
        if one.last:
            return
        time.sleep(REFRESH_S)
