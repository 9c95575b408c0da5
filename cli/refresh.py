"""Output that is drawn again when something has changed."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cli.client import Client
from cli.errors import AuthError, CliError, UsageError
from cli.feed import ClusterFeed

REFRESH_S = 1.0  # between two frames of a table, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The text to show now; `last` where it will not change any more."""

    text: str
    last: bool = False


def redraw(frames: Iterable[Frame], *, screen: bool = False) -> None:
    """Show frames: in place on a terminal (with `screen` all of it), else one below the other."""
    if not sys.stdout.isatty():
        for frame in frames:
            sys.stdout.write(frame.text + "\n")
            sys.stdout.flush()
        return
    with Live(console=Console(), auto_refresh=False, screen=screen) as live:
        for frame in frames:
            text = Text.from_ansi(frame.text, no_wrap=True, overflow="ellipsis")
            live.update(text, refresh=True)


def watch_table(client: Client, kinds: Iterable[str], draw: Callable[[], Frame]) -> None:
    """Show what `draw` returns, again when the cluster's entries of these kinds have changed, until the last.

    An unreachable gateway ends it only before the first frame.
    """
    with ClusterFeed(client, *kinds) as feed:
        redraw(_drawn(feed, draw))


def _drawn(feed: ClusterFeed, draw: Callable[[], Frame]) -> Iterator[Frame]:
    shown: Frame | None = None
    while True:
        try:
            shown = draw()
            yield shown
            if shown.last:
                return
        except (AuthError, UsageError):
            raise
        except CliError as error:
            if shown is None:
                raise
            yield Frame(text=f"{shown.text}(retrying: {error})\n")
        time.sleep(REFRESH_S)
        feed.wait()
