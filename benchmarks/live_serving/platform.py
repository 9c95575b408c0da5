"""A platform with slow links, on which functions load for seconds."""

from argparse import Namespace
from contextlib import AbstractContextManager

from benchmarks.harness.local_platform import LocalPlatform, running_platform


def slow_link_platform(args: Namespace, nodes: int, *flags: str) -> AbstractContextManager[LocalPlatform]:
    """Run a platform with the options of `add_platform` and these flags of `hypercast up`."""
    memory = ("--gpu-memory", args.memory, "--host-memory", args.memory)
    shared = ("--link-rate", args.link_rate, "--meter-interval", "5s", *memory)
    return running_platform(args.data_dir, *shared, *flags, nodes=nodes)
