"""`top`: nodes, functions and casts as they change."""

import shutil
import sys
import time
from collections.abc import Iterator

import click

from cli.client import Client
from cli.cluster_view import headline, tables
from cli.feed import ClusterFeed
from cli.options import client_options
from cli.refresh import Frame, redraw

REFRESH_S = 0.5  # between two screens, at least


@click.command("top")
@click.option("--once", is_flag=True, help="Print one screen and end.")
@client_options
def top_command(once: bool, client: Client) -> None:
    """Show nodes, functions and casts live, until Ctrl-C: the busiest functions and running casts first.

    It is drawn when something changes, at most twice a second. Rates are of the last ten seconds, tokens of
    the last two. A key of the role `deployer` sees its tenant's functions.

    \b
    Examples:
      hypercast top
      hypercast top --once
    """
    with ClusterFeed(client, "nodes", "functions", "instances", "casts", "blocks", "traffic") as feed:
        redraw(screens(feed, once=once), screen=not once)


def screens(feed: ClusterFeed, *, once: bool) -> Iterator[Frame]:
    """Yield what is shown of the cluster, again when it has changed."""
    while True:
        feed.wait()
        board, error = feed.board()
        if not board.at:  # nothing was shown yet
            if error is not None:
                raise error
            continue
        head = headline(board) + ("" if error is None else f"(retrying: {error})\n") + "\n"
        height = (
            shutil.get_terminal_size().lines - head.count("\n") - 1
            if sys.stdout.isatty() and not once
            else None
        )
        yield Frame(text=head + tables(board, height))
        if once:
            return
        time.sleep(REFRESH_S)
