"""Options shared by the benchmarks of serving while loading."""

from argparse import ArgumentParser
from pathlib import Path

from benchmarks.harness.arguments import at_least


def add_load(parser: ArgumentParser, *, requests: int, tokens: int) -> None:
    """Add the options of the load and its requests."""
    add = parser.add_argument
    add("--loading", type=at_least(2), default=4, help="nodes that load the model")
    add("--requests", type=at_least(1), default=requests, help="concurrent requests")
    add("--tokens", type=at_least(12), default=tokens, help="tokens of the longest request")


def add_platform(parser: ArgumentParser, *, width: int, link_rate: str) -> None:
    """Add the options of a platform on which a model takes seconds to load."""
    add = parser.add_argument
    add("--width", type=at_least(64), default=width, help="width of hidden states, a multiple of 64")
    add("--link-rate", default=link_rate, help="link rate of each node")
    add("--memory", default="256MiB", help="arena and host memory of each node")
    add("--seed", type=int, default=1, help="seed of the random choices")
    add("--data-dir", type=Path, help="keep the platform's folder here (default: a temporary folder)")
