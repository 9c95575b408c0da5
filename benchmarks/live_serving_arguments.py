"""What several benchmarks of loads that are served meanwhile take on the command line."""

from argparse import ArgumentParser
from pathlib import Path

from benchmarks.arguments import at_least


def add_load(parser: ArgumentParser, *, requests: int, tokens: int) -> None:
    """Who loads, and what is asked meanwhile."""
    add = parser.add_argument
    add("--loading", type=at_least(2), default=4, help="nodes that load it (default 4)")
    add("--requests", type=at_least(1), default=requests, help=f"under way at once (default {requests})")
    add("--tokens", type=at_least(12), default=tokens, help=f"of the longest request (default {tokens})")


def add_platform(parser: ArgumentParser, *, width: int, link_rate: str) -> None:
    """A model, and a platform on which it takes seconds to load."""
    add = parser.add_argument
    add(
        "--width",
        type=at_least(64),
        default=width,
        help=f"of hidden states, a multiple of 64 (default {width})",
    )
    add("--link-rate", default=link_rate, help=f"of each node (default {link_rate})")
    add("--memory", default="256MiB", help="each node's, of its arena and its host (default 256MiB)")
    add("--seed", type=int, default=1)
    add("--data-dir", type=Path, help="the platform's folder, which then stays")
