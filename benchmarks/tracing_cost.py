"""Measure what traces and JSON logs cost a gateway and a node in throughput.

Requests per second of the echo function, the cheapest call there is, so that a span weighs most: with
neither (`off`), again with neither (`off-again`: what is noise), with JSON logs (`json`), and with traces of
some requests a second (`traced-N`). Each has a platform of its own, which all run side by side and are loaded
in turns; a ratio is that of two loads of the same round. The processor time of gateway and node for a request
is the steadier figure where others use the machine. The collector is a process of this machine, which
reads what it gets and keeps nothing.

example:
  python -m benchmarks.tracing_cost --rounds 7 --json tracing-cost.json
"""

import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import uvloop

from benchmarks.gateway_overhead import LoadTarget, generate_load, hypercast_target
from benchmarks.harness.arguments import at_least, benchmark_parser, positive, say
from benchmarks.harness.local_platform import PLATFORM_FAILURES
from benchmarks.harness.processes import exit_on_sigterm, module
from benchmarks.harness.records import Record, Recording, all_but, describe_run, recording

_OFF, _AGAIN, _JSON = "off", "off-again", "json"


class _Discard(BaseHTTPRequestHandler):
    """A collector that takes everything and keeps nothing."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


def _collect() -> None:
    exit_on_sigterm()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Discard)
    print(server.server_address[1], flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector in a process of its own; yield its address."""
    process = subprocess.Popen(
        module("benchmarks.tracing_cost", "--collect"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.communicate()


def variants(endpoint: str, rates: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Return the flags of each platform, by its name."""
    traced = {f"traced-{rate}": ("--otlp-endpoint", endpoint, "--trace-rate", str(rate)) for rate in rates}
    return {_OFF: (), _AGAIN: (), _JSON: ("--log-format", "json"), **traced}


@dataclass(slots=True)
class Loads:
    """What one platform did in each round."""

    requests_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # of gateway and node for a request


def measure(targets: Mapping[str, LoadTarget], args: Namespace) -> dict[str, Loads]:
    """Load the platforms in turns."""
    found = {name: Loads() for name in targets}
    for target in targets.values():
        uvloop.run(generate_load(target, args.connections, min(2.0, args.seconds)))
    for number in range(args.rounds):
        names = list(targets)
        shift = number % len(names)  # each is the first of a round as often as the others
        for name in names[shift:] + names[:shift]:
            before_s = cpu_s(targets[name])
            rate, each = uvloop.run(generate_load(targets[name], args.connections, args.seconds))
            cpu_us = (cpu_s(targets[name]) - before_s) / len(each) * 1e6
            found[name].requests_per_s.append(rate)
            found[name].cpu_us.append(cpu_us)
            say(f"round {number + 1}/{args.rounds} {name:12} {rate:8.0f} requests/s, {cpu_us:.0f} us each")
    return found


def cpu_s(target: LoadTarget) -> float:
    """Return the processor time of the processes that serve a target."""
    times = [psutil.Process(pid).cpu_times() for pid in target.pids]
    return sum(one.user + one.system for one in times)


def records(found: Mapping[str, Loads]) -> list[Record]:
    """Return a record per platform; ratios are to `off`, of the same round."""
    rows = []
    for name, loads in found.items():
        rates = _ratios(loads.requests_per_s, found[_OFF].requests_per_s)
        times = _ratios(loads.cpu_us, found[_OFF].cpu_us)
        rows.append(
            {
                "name": name,
                "requests_per_s": loads.requests_per_s,
                "cpu_us": loads.cpu_us,
                "ratios": rates,
                "cpu_ratios": times,
                "cost": 1 - statistics.median(rates),
                "cpu_cost": statistics.median(times) - 1,
            }
        )
    return rows


def _ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, bases, strict=True)]


def show(row: Record) -> str:
    """Format a record as one line."""
    rate, cpu_us = (statistics.median(row[name]) for name in ("requests_per_s", "cpu_us"))
    most, least = (1 - ratio for ratio in (min(row["ratios"]), max(row["ratios"])))
    return (
        f"{row['name']:12} {rate:8.0f} requests/s: costs {row['cost']:+.1%} ({least:+.1%} to {most:+.1%}); "
        f"{cpu_us:.0f} us of processor time each: {row['cpu_cost']:+.1%}"
    )


def run(args: Namespace, out: Recording) -> None:
    """Measure on platforms of its own."""
    params = all_but(args, "collect") | describe_run("benchmarks.tracing_cost")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hypercast-tracing-")))
        endpoint = stack.enter_context(collector())
        targets = {
            name: stack.enter_context(hypercast_target(folder / name, 1, *flags))
            for name, flags in variants(endpoint, args.rates).items()
        }
        for row in records(measure(targets, args)):
            out.add(row | {"params": params})


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = benchmark_parser("benchmarks.tracing_cost", __doc__)
    add = parser.add_argument
    add("--rates", type=at_least(1), nargs="+", default=[20, 200], help="--trace-rate of the platforms")
    add("--rounds", type=at_least(1), default=5)
    add("--connections", type=at_least(1), default=16)
    add("--seconds", type=positive, default=4.0, help="of load for each platform and round")
    add("--collect", action="store_true", help="be the collector; prints its port")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.collect:
        _collect()
        return
    with recording("tracing_cost", json=args.json, show=show, failures=PLATFORM_FAILURES) as out:
        run(args, out)


if __name__ == "__main__":
    main()
