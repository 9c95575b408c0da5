"""How fast weights get from disk to host memory and from there to the device, beside others and the limits.

`python -m benchmarks.load --size 1GB --json FILE` writes a random Llama as safetensors file and as image,
and in turns brings the same weights into memory. `params.path` says which way:

disk-host    ends with all weights in memory, from which a device or an engine can take them.
             `hypercast` is the node's loader: from the store's file into an image of a host tier that had
             none, shared by all processes of the host, every unit checked against its checksum. `loader`
             has what a node has that idled before: the spare of its default size, memory that is there
             and mapped (invoker/spare.py; making it takes a second or so per GB, and is not counted).
             `loader-fresh` has none: the node's first load, one that follows another at once, or one
             into a full host tier.
             `safetensors` ends with every tensor in memory of its own, private and fresh (`load_file`,
             or tensor by tensor with `safe_open`, each copied out of the mapped file), nothing checked;
             `transformers` is `from_pretrained`, each page of it touched. `safetensors-mapped` only maps
             the file and touches each page: the weights stay the page cache's, and the kernel may drop
             them. Ours of that kind is `hypercast-mapped`: an image that the host tier has.
             `params.cache` is `cold` (the kernel is told to drop the files before each reading) or `warm`
             (the page cache has them whole).
             `limit` reads the image's file and checks nothing: around the page cache (`direct`, so many
             blocks of 8 MiB at once) or through it (`buffered`), into shared memory that is mapped and
             was written before, or into private memory in huge pages (`huge`), to which a disk's requests
             are not split by page; no reader of the file can beat the faster; `fresh`, into shared memory
             that is not there yet; `checked`, with each unit's checksum taken, which a loader that trusts no
             disk cannot go without.
host-device  the copy from the host tier to the arena, beside a plain copy of as many bytes (`limit`).
bind         making the engine on an image that is in the arena: all views, the KV cache, no copy.

`limit_s` is the fastest limit of the same path and cache (so one that checks nothing, into memory that is
there); `share_of_limit` is ours in parts of it, by mode of limit in `shares`.
"""

import argparse
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.arguments import at_least, listed, parser_of, say, size
from benchmarks.load_limits import COLD, WARM, Way, read_limits
from benchmarks.load_ways import device_ways, host_ways, resident
from benchmarks.load_weights import StoredWeights, forget, prepare, recall
from benchmarks.machine import ROOT, describe_machine, tell_records

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
CACHES = (COLD, WARM)


@dataclass(slots=True)
class Rounds:
    """The seconds of one way, with the page cache in one state."""

    way: Way
    cache: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(ways: Sequence[Way], cache: str, files: Sequence[Path], rounds: int) -> list[Rounds]:
    """Take the ways in turns; the first turn is not counted.

    Each turn has an order of its own, since what came just before matters to a disk.
    """
    found = [Rounds(way, cache) for way in ways if cache in way.caches]
    order = random.Random(1)
    for number in range(-1, rounds):
        for one in order.sample(found, len(found)):
            if cache:
                (forget if cache == COLD else recall)(*files)
            seconds = one.way.run()
            if number >= 0:
                one.seconds.append(seconds)
        say(f"{found[0].way.path} {cache}: {number + 1} of {rounds} rounds")
    return found


def measure_all(weights: StoredWeights, shm: Path, args: argparse.Namespace) -> list[Rounds]:
    with resident(weights, shm / "tiers" / "resident") as tier:
        ways = [*host_ways(weights, shm, tier), *read_limits(weights.blob, shm)]
        files = (weights.safetensors, weights.blob)
        found = [one for cache in args.cache for one in measure(ways, cache, files, args.rounds)]
        with device_ways(weights, tier, args.device) as further:
            return [*found, *measure(further, "", files, args.rounds)]


def records(found: list[Rounds], common: dict[str, Any]) -> list[dict[str, Any]]:
    return [_record(one, found, common) for one in found]


def _record(one: Rounds, found: list[Rounds], common: dict[str, Any]) -> dict[str, Any]:
    limits = {
        other.way.mode: other.median_s
        for other in found
        if other.way.name == "limit" and (other.way.path, other.cache) == (one.way.path, one.cache)
    }
    row: dict[str, Any] = {
        "name": one.way.name,
        "params": {"path": one.way.path, "cache": one.cache, "mode": one.way.mode, **common},
        "seconds": one.seconds,
        "median_s": one.median_s,
        "gb_per_s": common["bytes"] / one.median_s / 1e9,
    }
    if limits:
        limit_s = min(limits.values())
        row |= {
            "limit_s": limit_s,
            "ratio_to_limit": one.median_s / limit_s,
            "share_of_limit": limit_s / one.median_s,
            "shares": {mode: seconds / one.median_s for mode, seconds in limits.items()},
        }
    return row


def show(row: dict[str, Any]) -> str:
    """One line for people."""
    params = row["params"]
    share = f"  {row['share_of_limit']:5.2f} of the limit" if "limit_s" in row else ""
    return (
        f"{params['path']:11} {params['cache']:4} {row['name']:18} {params['mode']:14}"
        f" {row['median_s'] * 1e3:8.1f} ms {row['gb_per_s']:7.2f} GB/s{share}"
    )


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="hypercast-load-"))
    shm = Path(tempfile.mkdtemp(prefix="hypercast-load-", dir=args.shm_dir))
    try:
        say(f"writing about {args.size} bytes to {folder}")
        weights = prepare(folder, TOKENIZER, args.size)
        common = {
            "bytes": weights.manifest.nbytes,
            "device": args.device,
            "rounds": args.rounds,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            **describe_machine("benchmarks.load"),
        }
        found = measure_all(weights, shm, args)
    finally:
        shutil.rmtree(shm)
        if args.folder is None:
            shutil.rmtree(folder)
    return records(found, common)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.load", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--size", type=size, default=10**9, help="of the weights, about (default: 1GB)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:N (needs cupy)")
    parser.add_argument("--cache", type=listed(str, CACHES), default=list(CACHES), help="default: cold,warm")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: torch's default")
    parser.add_argument("--folder", type=Path, help="keep the weights here, on the disk to read from")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"), help="where host tiers are made")
    args = parser.parse_args(argv)
    rows = run(args)
    tell_records(rows, show, args.json)


if __name__ == "__main__":
    main()
