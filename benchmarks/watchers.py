"""Measure what watchers of the console cost a gateway, and how far what they see lags behind the nodes.

A cast: one node casts a random model to the others over slow links, in turns without and with one watcher.
Measured are the processor time of the gateway and, at the watcher, for each report of a node, the time from
the node's look at its memory until the frame is read. A node looks every 100 ms, so what is shown is at most
that much older. Throughput: requests per second of the echo function with no, one and many watchers, in
turns; the watchers are a process of this machine, too, so its own share of the processors is given.

example:
  python -m benchmarks.watchers --nodes 8 --rounds 3 --json watchers.json
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.gateway_overhead import generate_load, hypercast_target
from benchmarks.harness.admin_client import AdminClient, http_client
from benchmarks.harness.arguments import at_least, benchmark_parser, positive, say
from benchmarks.harness.local_platform import PLATFORM_FAILURES, LocalPlatform, running_platform
from benchmarks.harness.percentile import percentile
from benchmarks.harness.processes import exit_on_sigterm, module
from benchmarks.harness.records import Record, Recording, all_but, describe_run, recording
from benchmarks.live_serving.models import write_model
from registry.messages.arrivals import FollowArrivals

_FUNCTION = "watched"
_KEY = "HYPERCAST_API_KEY"
_LOOK_S = FollowArrivals().interval_ms / 1000  # of a node at its memory
_LOAD_CONNECTIONS = 16


async def _watch(url: str, key: str, count: int) -> None:
    """Watch until ended; print the lags, in seconds, once standard input is closed."""
    lags: list[float] = []

    async def one(number: int) -> None:
        async with http_client(url, key, None) as http, http.stream("GET", "/admin/watch") as answer:
            async for line in answer.aiter_lines():
                if number or not line.startswith("data: "):
                    continue
                now = time.time()
                frame = json.loads(line[6:])
                if not frame["full"]:
                    lags.extend(now - blocks["at"] for blocks in frame["set"].get("blocks", {}).values())

    watching = [asyncio.create_task(one(number)) for number in range(count)]
    print("watching", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)
    print(json.dumps(lags), flush=True)


class Watchers:
    """The watchers' process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._watched = psutil.Process(process.pid)
        self.lags: list[float] = []

    @property
    def cpu_s(self) -> float:
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def end(self) -> None:
        out, _ = self._process.communicate("")
        self.lags = json.loads(out)


@contextmanager
def watchers(url: str, key: str, count: int) -> Iterator[Watchers | None]:
    """Watch with so many streams of one process; none for 0."""
    if not count:
        yield None
        return
    command = module("benchmarks.watchers", "--watch", url, str(count))
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, _KEY: key}
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(2.0)  # the whole frames at the beginning are no part of what is measured
    found = Watchers(process)
    try:
        yield found
    finally:
        found.end()


def _gateway(platform: LocalPlatform) -> psutil.Process:
    return platform.processes()[platform.gateways[0].name]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _cast(platform: LocalPlatform, admin: AdminClient, count: int) -> dict[str, Any]:
    """Cast to all nodes but the source; return what the gateway spent, and what a watcher saw."""
    source, *targets = [component.name for component in platform.nodes]
    await admin.place_image(_FUNCTION, [source])
    gateway = _gateway(platform)
    with watchers(platform.url, platform.admin_key, count) as seen:
        before_s, began_s = _cpu_s(gateway), time.monotonic()
        await admin.scale(_FUNCTION, len(targets), targets, wait=True)
        seconds = time.monotonic() - began_s
        spent_s = _cpu_s(gateway) - before_s
    return {"seconds": seconds, "gateway_share": spent_s / seconds, "lags": seen.lags if seen else []}


async def _deploy(platform: LocalPlatform, folder: Path, nodes: int) -> None:
    limits = ("--max-instances", str(nodes), "--keep-alive", "10m", "--dtype", "float32", "--live", "off")
    await asyncio.to_thread(platform.command, "deploy", str(folder), "--name", _FUNCTION, *limits)


async def casts(platform: LocalPlatform, args: Namespace, folder: Path) -> list[Record]:
    await _deploy(platform, folder, args.nodes)
    found: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    async with http_client(platform.url, platform.admin_key, None) as http:
        admin = AdminClient(http)
        for number in range(args.rounds):
            for count in (0, 1) if number % 2 == 0 else (1, 0):
                one = await _cast(platform, admin, count)
                found[count].append(one)
                say(f"{count} watchers: {one['gateway_share']:.2%} of a core over {one['seconds']:.1f} s")
    return [cast_record(found, args.nodes)]


def cast_record(found: Mapping[int, Sequence[Mapping[str, Any]]], nodes: int) -> Record:
    """Return the record of casts to `nodes` nodes, by their number of watchers (0, 1)."""
    shares = {count: [one["gateway_share"] for one in rows] for count, rows in found.items()}
    lags = [lag for one in found[1] for lag in one["lags"]]
    return {
        "name": "cast",
        "nodes": nodes,
        "gateway_share_unwatched": shares[0],
        "gateway_share_watched": shares[1],
        "watcher_share": statistics.median(shares[1]) - statistics.median(shares[0]),
        "reports": len(lags),
        "lag_p50_s": percentile(lags, 0.5),
        "lag_p99_s": percentile(lags, 0.99),
        "lag_max_s": max(lags, default=None),
        "shown_within_s": max(lags, default=0.0) + _LOOK_S,
    }


def throughput(args: Namespace, folder: Path) -> list[Record]:
    counts = (0, 1, args.watchers)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    shares: dict[int, list[float]] = {count: [] for count in counts}
    with hypercast_target(folder, 1) as target:
        url = f"http://127.0.0.1:{target.ports[0]}"
        uvloop.run(generate_load(target, _LOAD_CONNECTIONS, 2.0))
        for number in range(args.rounds):
            for count in counts if number % 2 == 0 else reversed(counts):
                with watchers(url, target.key, count) as seen:
                    before_s = seen.cpu_s if seen else 0.0
                    rate, _ = uvloop.run(generate_load(target, _LOAD_CONNECTIONS, args.seconds))
                    shares[count].append((seen.cpu_s - before_s) / args.seconds if seen else 0.0)
                rates[count].append(rate)
                say(f"{count} watchers: {rate:.0f} requests/s")
    base = statistics.median(rates[0])
    return [
        {
            "name": "throughput",
            "watchers": count,
            "requests_per_s": rates[count],
            "median_requests_per_s": statistics.median(rates[count]),
            "ratio": statistics.median(rates[count]) / base,
            "watchers_share": statistics.median(shares[count]),
        }
        for count in counts
    ]


def show(row: Record) -> str:
    """Format a record as one line."""
    if row["name"] == "throughput":
        rate, ratio = row["median_requests_per_s"], row["ratio"]
        own = f"their own process takes {row['watchers_share']:.1%} of a core"
        return f"{row['watchers']:4} watchers: {rate:.0f} requests/s ({ratio:.3f}), {own}"
    p50, p99, most, within = (
        row[f"{name}_s"] * 1e3 for name in ("lag_p50", "lag_p99", "lag_max", "shown_within")
    )
    return (
        f"one watcher of a cast to {row['nodes']} nodes: {row['watcher_share']:.2%} of a core of the "
        f"gateway; lag p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {most:.0f} ms; shown within {within:.0f} ms"
    )


def run(args: Namespace, out: Recording) -> None:
    """Measure on platforms of its own."""
    params = all_but(args, "watch") | describe_run("benchmarks.watchers")
    memory = ("--gpu-memory", args.memory, "--host-memory", args.memory)
    with tempfile.TemporaryDirectory(prefix="hypercast-watchers-") as name:
        folder = Path(name)
        params["image_bytes"] = write_model("llama", args.width, folder / "model")
        with running_platform(None, "--link-rate", args.link_rate, *memory, nodes=args.nodes + 1) as platform:
            for row in uvloop.run(casts(platform, args, folder / "model")):
                out.add(row | {"params": params})
        for row in throughput(args, folder):
            out.add(row | {"params": params})


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = benchmark_parser("benchmarks.watchers", __doc__)
    add = parser.add_argument
    add("--nodes", type=at_least(1), default=8, help="targets of the cast")
    add("--link-rate", default="20mbit", help="of each node")
    add("--width", type=at_least(64), default=256, help="of the model's hidden states")
    add("--memory", default="256MiB", help="of each node, on the accelerator and in the host tier")
    add("--rounds", type=at_least(1), default=3)
    add("--watchers", type=at_least(1), default=100, help="many of them")
    add("--seconds", type=positive, default=5.0, help="of load for each throughput")
    add("--watch", nargs=2, metavar=("URL", "COUNT"), help="be the watchers; the key is in HYPERCAST_API_KEY")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.watch:
        exit_on_sigterm()
        uvloop.run(_watch(args.watch[0], os.environ[_KEY], int(args.watch[1])))
        return
    with recording("watchers", json=args.json, show=show, failures=PLATFORM_FAILURES) as out:
        run(args, out)


if __name__ == "__main__":
    main()
