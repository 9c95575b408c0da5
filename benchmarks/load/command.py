"""Measure how fast weights are loaded from disk to host memory and to the device, beside rivals and limits.

Writes a random Llama as safetensors file and as image, and in turns loads the same weights into memory.
`params.path` is the path measured:

disk-host    ends with all weights in memory from which a device or an engine can read them.
             `hypercast` is the node's loader: from the store's file into a new image of a host tier, shared
             by all processes of the host, every unit checked against its checksum. `loader` has the
             pre-faulted buffers of an idle node's default size (`invoker.host_tier.buffer_pool`; making
             them, about a second per GB, is not counted). `loader-fresh` has none: a node's first load, one
             right after another, or one into a full host tier.
             `safetensors` ends with every tensor in private fresh memory (`load_file`, or tensor by tensor
             with `safe_open`, each copied out of the mapped file), unchecked; `transformers` is
             `from_pretrained`, with each page touched. `safetensors-mapped` only maps the file and touches
             each page: the weights stay in the page cache, and the kernel may drop them. Ours of that kind is
             `hypercast-mapped`: an image that the host tier holds.
             `params.cache` is `cold` (the files are dropped from the page cache before each load) or `warm`
             (the page cache holds them completely).
             `limit` reads the image's file without checks: around the page cache (`direct`, with that many
             concurrent blocks of 8 MiB) or through it (`buffered`), into mapped and touched shared memory, or
             into private huge pages (`huge`), where a disk's requests are not split by page; no reader of the
             file can be faster than the best of these. `fresh` reads into new shared memory; `checked` also
             computes each unit's checksum, the minimum for a loader that verifies its disk.
host-device  the copy from the host tier to the arena, beside a plain copy of as many bytes (`limit`).
bind         making the engine on an image in the arena: all views and the KV cache, without a copy.

`limit_s` is the fastest limit of the same path and cache (unchecked, into existing memory); `share_of_limit`
is ours relative to it, and `shares` by mode of limit.

example:
  python -m benchmarks.load --size 1GB --rounds 5 --json load.json
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

from benchmarks.harness.arguments import at_least, benchmark_parser, say, size, some_of
from benchmarks.harness.processes import ROOT
from benchmarks.harness.records import chosen, describe_run, recording, timed
from benchmarks.load.limits import COLD, WARM, LoadMethod, read_limits
from benchmarks.load.methods import device_methods, host_methods, resident
from benchmarks.load.weights import StoredWeights, drop_from_cache, prepare, read_into_cache

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
CACHES = (COLD, WARM)


@dataclass(slots=True)
class Rounds:
    """The seconds of one method with one state of the page cache."""

    method: LoadMethod
    cache: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(methods: Sequence[LoadMethod], cache: str, files: Sequence[Path], rounds: int) -> list[Rounds]:
    """Run the methods in turns, in a new order per turn because a disk depends on earlier reads.

    The first turn is not counted.
    """
    found = [Rounds(method, cache) for method in methods if cache in method.caches]
    order = random.Random(1)
    for number in range(-1, rounds):
        for one in order.sample(found, len(found)):
            if cache:
                (drop_from_cache if cache == COLD else read_into_cache)(*files)
            seconds = one.method.run()
            if number >= 0:
                one.seconds.append(seconds)
        say(f"{found[0].method.path} {cache}: {number + 1} of {rounds} rounds")
    return found


def measure_all(weights: StoredWeights, shm: Path, args: argparse.Namespace) -> list[Rounds]:
    with resident(weights, shm / "tiers" / "resident") as tier:
        methods = [*host_methods(weights, shm, tier), *read_limits(weights.blob, shm)]
        files = (weights.safetensors, weights.blob)
        found = [one for cache in args.cache for one in measure(methods, cache, files, args.rounds)]
        with device_methods(weights, tier, args.device) as further:
            return [*found, *measure(further, "", files, args.rounds)]


def records(found: list[Rounds], common: dict[str, Any]) -> list[dict[str, Any]]:
    return [_record(one, found, common) for one in found]


def _record(one: Rounds, found: list[Rounds], common: dict[str, Any]) -> dict[str, Any]:
    limits = {
        other.method.mode: other.median_s
        for other in found
        if other.method.name == "limit" and (other.method.path, other.cache) == (one.method.path, one.cache)
    }
    params = {"path": one.method.path, "cache": one.cache, "mode": one.method.mode, **common}
    limit_s = min(limits.values(), default=None)
    row = timed(one.method.name, params, one.seconds, limit_s)
    row["gb_per_s"] = common["bytes"] / one.median_s / 1e9
    if limit_s is not None:
        row["share_of_limit"] = limit_s / one.median_s
        row["shares"] = {mode: seconds / one.median_s for mode, seconds in limits.items()}
    return row


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
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
            **chosen(args, "device", "rounds"),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            **describe_run("benchmarks.load"),
        }
        found = measure_all(weights, shm, args)
    finally:
        shutil.rmtree(shm)
        if args.folder is None:
            shutil.rmtree(folder)
    return records(found, common)


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("benchmarks.load", __doc__)
    add = parser.add_argument
    add("--size", type=size, default="1GB", help="size of the weights, about")
    add("--device", default="cpu", help="cpu, or cuda:N (needs cupy; default %(default)s)")
    add("--cache", type=some_of(CACHES), default="cold,warm", help="of cold,warm")
    add("--rounds", type=at_least(1), default=5, help="rounds")
    add("--threads", type=int, default=0, help="threads of torch (default: torch's default)")
    add("--folder", type=Path, help="keep the weights here, on the disk to measure (default: temporary)")
    add("--shm-dir", type=Path, default=Path("/dev/shm"), help="folder in shared memory for host tiers")
    args = parser.parse_args(argv)
    with recording("load", json=args.json, show=show) as out:
        out.add(*run(args))


if __name__ == "__main__":
    main()
