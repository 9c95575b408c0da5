"""Measure what traces and JSON logs cost a gateway and a node in throughput.

Requests per second of the echo function, the cheapest call there is, so that a span weighs most: with
neither (`off`), again with neither (`off-again`: what is noise), with JSON logs (`json`), and with traces of
some requests a second (`traced-N`). Each has a platform of its own, which all run side by side and are loaded
in turns; a ratio is that of two loads of the same round. The collector is a process of this machine, which
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


def measure(targets: Mapping[str, LoadTarget], args: Namespace) -> dict[str, list[float]]:
    """Return the requests per second of each platform, by round."""
    found: dict[str, list[float]] = {name: [] for name in targets}
    for target in targets.values():
        uvloop.run(generate_load(target, args.connections, min(2.0, args.seconds)))
    for number in range(args.rounds):
        names = list(targets)
        shift = number % len(names)  # each is the first of a round as often as the others
        for name in names[shift:] + names[:shift]:
            rate, _ = uvloop.run(generate_load(targets[name], args.connections, args.seconds))
            found[name].append(rate)
            say(f"round {number + 1}/{args.rounds} {name:12} {rate:8.0f} requests/s")
    return found


def records(found: Mapping[str, Sequence[float]]) -> list[Record]:
    """Return a record per platform; ratios are to `off`, of the same round."""
    rows = []
    for name, rates in found.items():
        ratios = [rate / base for rate, base in zip(rates, found[_OFF], strict=True)]
        rows.append(
            {
                "name": name,
                "requests_per_s": list(rates),
                "median_requests_per_s": statistics.median(rates),
                "ratios": ratios,
                "ratio": statistics.median(ratios),
                "cost": 1 - statistics.median(ratios),
            }
        )
    return rows


def show(row: Record) -> str:
    """Format a record as one line."""
    low, high = min(row["ratios"]), max(row["ratios"])
    return (
        f"{row['name']:12} {row['median_requests_per_s']:8.0f} requests/s, {row['ratio']:.3f} of off "
        f"({low:.3f} to {high:.3f}): {row['cost']:+.1%}"
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
