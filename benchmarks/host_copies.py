"""Measure how many host copies a served model takes, and how soon its instances start from one of them.

Runs `hypercast up` with --nodes nodes, each on a virtual host of its own, deploys a random Llama on the
processor, and in each of --rounds starts an instance on every node from the single host copy that the cluster
keeps. Then all instances serve for --minutes, with a request every half second. Contenders run one after the
other:
hypercast   hosts drop their copies once their accelerators serve the model
all-copies  hosts keep them (`--served-copies`)

`seconds` are those of the starts, from the order until all instances are ready; `mean_copies` is the integral
of host bytes from the first order of the last round until the end, divided by that time and by the size of
the image; `limit_copies` is the one copy that the cluster keeps. `peak_copies` is the most that a host which
starts from another one had at any moment of a start in its host tier and in memory files of its process,
complete or not, in sizes of the image; its limit is none.

example:
  python -m benchmarks.host_copies --minutes 10 --rounds 3 --json host-copies.json
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.harness.arguments import UNLIMITED, at_least, benchmark_parser, positive, say
from benchmarks.harness.local_platform import (
    PLATFORM_FAILURES,
    LocalPlatform,
    PlatformStateError,
    running_platform,
)
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_llama import write_random_llama
from benchmarks.harness.records import Record, Recording, chosen, describe_run, recording, timed
from benchmarks.trace.measures import integral
from benchmarks.trace.watch import UsageMonitor, UsageSample
from invoker.host_tier.folder import PART, USERS

_NAME = "served"
_TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
_CONTENDERS = {"hypercast": (), "all-copies": ("--served-copies", UNLIMITED)}
_PATIENCE_S = 120.0
_PAUSE_S = 0.05
_CALL_EVERY_S = 0.5
_SAMPLE_S = 0.01
_BLOCK_BYTES = 512  # of st_blocks
_PROMPT = [1, 2, 3, 4]


def measure(args: argparse.Namespace, out: Recording) -> None:
    """Run both contenders. Raises what PLATFORM_FAILURES names."""
    common = {
        **chosen(args, "nodes", "minutes", "rounds", "layers"),
        **describe_run("benchmarks.host_copies"),
    }
    with tempfile.TemporaryDirectory(prefix="hypercast-host-copies-") as folder:
        model = Path(folder) / "model"
        write_random_llama(model, _TOKENIZER, args.layers)
        for name, flags in _CONTENDERS.items():
            say(f"{name}: starting {args.nodes} nodes")
            with running_platform(None, *flags, "--keep-hot", "0s", nodes=args.nodes) as platform:
                out.add(_run(name, platform, model, args, common))


def _run(name: str, platform: LocalPlatform, model: Path, args: argparse.Namespace, common: Record) -> Record:
    deployed = platform.json("deploy", str(model), "--name", _NAME, "--keep-alive", "24h")
    seconds, nbytes, peak_bytes = [], int(deployed["bytes"]), 0
    with UsageMonitor(f"unix://{platform.data / 'redis.sock'}") as monitor:
        for turn in range(args.rounds):
            _leave_one_copy(platform, monitor, nbytes)
            with _peaks(platform) as peaks:
                started_s = time.monotonic()
                platform.command("scale", _NAME, "--instances", str(args.nodes), "--wait")
                seconds.append(time.monotonic() - started_s)
            peak_bytes = max(peak_bytes, *peaks)
            say(f"{name}: start {turn + 1} of {args.rounds} took {seconds[-1]:.2f} s")
        with _calls(platform) as answered:
            ends_s = started_s + 60 * args.minutes
            while (left_s := ends_s - time.monotonic()) > 0:
                say(f"{name}: {left_s:.0f} s left, {monitor.samples[-1].host_bytes / nbytes:.1f} host copies")
                time.sleep(min(left_s, 10.0))
    copies = mean_copies(monitor.samples, nbytes, started_s, ends_s)
    figures = {
        "mean_copies": copies,
        "limit_copies": 1.0,
        "peak_copies": peak_bytes / nbytes,
        "calls": len(answered),
    }
    return timed(name, {**common, "image_bytes": nbytes}, seconds, **figures)


def mean_copies(samples: Sequence[UsageSample], nbytes: int, from_s: float, to_s: float) -> float:
    """Return the mean number of host copies between two moments of the monotonic clock."""
    series = [(sample.at_s, float(sample.host_bytes)) for sample in samples]
    return round(integral(series, from_s, to_s) / (to_s - from_s) / nbytes, 6)


def _leave_one_copy(platform: LocalPlatform, monitor: UsageMonitor, nbytes: int) -> None:
    """Stop all instances and drop all copies but the kept one. Raises PlatformStateError."""
    platform.command("scale", _NAME, "--instances", "0")
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        latest = monitor.samples[-1]
        if not latest.allocated and latest.host_bytes == nbytes and not _on_accelerators(platform):
            return
        if time.monotonic() > deadline_s:
            raise PlatformStateError(f"{latest.host_bytes / nbytes:g} host copies are left, not one")
        if not latest.allocated and latest.host_bytes > nbytes:
            platform.command("evict", _NAME)
        time.sleep(_PAUSE_S)


@contextmanager
def _peaks(platform: LocalPlatform) -> Iterator[list[int]]:
    """Yield the most bytes of each host that had no copy before the block, as sampled inside."""
    nodes: list[dict[str, Any]] = platform.json("nodes")
    processes = [Path(f"/proc/{node['pid']}/fd") for node in nodes if not node["tiers"]["host"]]
    places = [(_host_tier(process), process) for process in processes]
    peaks = [0] * len(places)

    def sample(stop: threading.Event) -> None:
        while not stop.wait(_SAMPLE_S):
            for index, (tier, process) in enumerate(places):
                peaks[index] = max(peaks[index], tier_bytes(tier) + memory_file_bytes(process))

    with _beside(sample):
        yield peaks


@contextmanager
def _beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work`, until its event is set, in a thread beside the block."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), name="beside")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _host_tier(descriptors: Path) -> Path:
    """Return the folder of the host tier that a node's process has joined. Raises PlatformStateError."""
    for entry in descriptors.iterdir():
        with suppress(FileNotFoundError):
            path = entry.readlink()
            if path.name == USERS:
                return path.parent
    raise PlatformStateError(f"{descriptors}: no host tier is open")


def tier_bytes(folder: Path) -> int:
    """Return the memory of the images of a host tier, complete or not."""
    total = 0
    for path in folder.iterdir():
        if path.suffix in ("", PART):
            with suppress(FileNotFoundError):
                total += path.stat().st_blocks * _BLOCK_BYTES
    return total


def memory_file_bytes(descriptors: Path) -> int:
    """Return the memory of the files in memory that a process has open."""
    found = {}
    for entry in descriptors.iterdir():
        with suppress(FileNotFoundError):
            if str(entry.readlink()).startswith("/memfd:"):
                stat = entry.stat()
                found[stat.st_ino] = stat.st_blocks * _BLOCK_BYTES
    return sum(found.values())


def _on_accelerators(platform: LocalPlatform) -> bool:
    nodes: list[dict[str, Any]] = platform.json("nodes")
    return any(node["tiers"]["gpu"] for node in nodes)


@contextmanager
def _calls(platform: LocalPlatform) -> Iterator[list[float]]:
    """Send requests, one after the other, until the block ends; yield the seconds that each took.

    Raises what the first failed one raised.
    """
    took: list[float] = []
    failures: list[Exception] = []

    def send(stop: threading.Event) -> None:
        headers = {"Authorization": f"Bearer {platform.admin_key}"}
        body = {"model": _NAME, "prompt": _PROMPT, "max_tokens": 4}
        try:
            with httpx2.Client(base_url=platform.url, headers=headers, timeout=_PATIENCE_S) as client:
                while not stop.wait(_CALL_EVERY_S):
                    started_s = time.monotonic()
                    client.post("/v1/completions", json=body).raise_for_status()
                    took.append(time.monotonic() - started_s)
        except httpx2.HTTPError as error:
            failures.append(error)

    with _beside(send):
        yield took
    if failures:
        raise failures[0]


def show(row: Record) -> str:
    """Format a record as one line."""
    return (
        f"{row['name']:11} {row['mean_copies']:5.2f} host copies  "
        f"all instances ready after {row['median_s']:.2f} s  "
        f"at most {row['peak_copies']:.2f} on a host during a start  {row['calls']} calls"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with a message if it is wrong."""
    parser = benchmark_parser("benchmarks.host_copies", __doc__)
    add = parser.add_argument
    add("--nodes", type=at_least(2), default=8, help="nodes, each with an instance")
    add("--minutes", type=positive, default=10.0, help="minutes of serving")
    add("--rounds", type=at_least(1), default=3, help="starts of all instances from one copy")
    add("--layers", type=at_least(1), default=1, help="layers of the model, about 51 MB each")
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with recording("host-copies", json=args.json, show=show, failures=PLATFORM_FAILURES) as out:
        measure(args, out)


if __name__ == "__main__":
    main()
