"""Measure each of the gateway's layers below its application: an echo with and without it.

One server process for each variant serves the same JSON echo in turns. `uvicorn` is uvicorn's own protocol,
and `gateway` the one that bounds request heads. `starlette-router` and `table-router` route the echo among
all paths of the gateway's table, on top of `gateway`. Each record has the requests per second, the median,
and the server's processor time for a request, which other load hardly changes.

A record of 2026-11-24 also has the variants `bounded` (today's `gateway`), `cycle` (our own
request cycle), `corked` (joined writes) and `gateway` (both). They gained 3 us at most, under 1 % of a
call, and were removed. Since then `gateway` joins the head and the body of a whole response again, which
is one system call and one wake-up of the client less.

example:
  python -m benchmarks.http_layers --rounds 5 --seconds 4 --json layers.json
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
from starlette.requests import Request
from starlette.routing import Route
from starlette.routing import Router as StarletteRouter
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from benchmarks.gateway_overhead import LoadTarget, generate_load, is_ready
from benchmarks.harness.arguments import at_least, make_parser, positive
from benchmarks.harness.local_platform import free_port
from benchmarks.harness.records import describe_run, recording
from gateway.api.operations import OPERATIONS, Handlers
from gateway.http.protocol import BoundedHttpProtocol
from gateway.http.responses import JsonReply
from gateway.requests.routing import Router

VARIANTS = ("uvicorn", "gateway", "starlette-router", "table-router")
CONNECTIONS = (1, 16)
PATH = "/functions/echo/invoke"
START_S = 30.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await JsonReply(message["body"], 200, ())(scope, receive, send)


def make_echo(variant: str) -> ASGIApp:
    """Return the application: the echo itself, or behind one of the routers."""
    if variant == "starlette-router":

        async def handle(request: Request) -> Any:
            return JsonReply(await request.body(), 200, ())

        paths = [(op.path, op.method.upper()) for op in OPERATIONS]
        return StarletteRouter(
            [Route(path, handle, methods=[method]) for path, method in paths], redirect_slashes=False
        )
    if variant == "table-router":

        async def answer(request: Request) -> Any:
            return JsonReply(await request.body(), 200, ())

        router = Router(OPERATIONS, cast(Handlers, AnyHandler(answer)))

        async def routed(scope: Scope, receive: Receive, send: Send) -> None:
            await router.find(scope)(scope, receive, send)

        return routed
    return echo


class AnyHandler:
    """Handlers of which every attribute is the same handler."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return AnyHandler(self._handler)

    async def __call__(self, request: Request) -> Any:
        return await self._handler(request)


def serve(variant: str, port: int) -> None:
    """Serve one variant until the process is killed."""
    uvicorn.run(
        make_echo(variant),
        port=port,
        loop="uvloop",
        http=HttpToolsProtocol if variant == "uvicorn" else BoundedHttpProtocol,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
        proxy_headers=False,
    )


@contextmanager
def run_server(variant: str) -> Iterator[tuple[LoadTarget, int]]:
    """Run a variant; yield its target and process id."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.http_layers", "--serve", variant, "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        target = LoadTarget(name=variant, ports=(port,), path=PATH)
        deadline_s = time.monotonic() + START_S
        while not is_ready(target):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the server of {variant} did not start")
            time.sleep(0.1)
        yield target, process.pid
    finally:
        process.kill()
        process.wait()


def processor_s(pid: int) -> float:
    """Return the processor time of all threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def run(rounds: int, seconds: float, variants: list[str]) -> list[dict[str, Any]]:
    common = {"rounds": rounds, "round_s": seconds} | describe_run("benchmarks.http_layers")
    rows: dict[tuple[str, int], dict[str, list[float]]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(run_server(variant)) for variant in variants]
        for target, _ in servers:
            uvloop.run(generate_load(target, 16, min(1.0, seconds)))  # warm-up
        for _ in range(rounds):
            for connections in CONNECTIONS:
                for target, pid in servers:
                    before_s = processor_s(pid)
                    rate, each = uvloop.run(generate_load(target, connections, seconds))
                    spent_us = (processor_s(pid) - before_s) / len(each) * 1e6
                    row = rows.setdefault((target.name, connections), {"rate": [], "s": [], "us": []})
                    row["rate"].append(rate)
                    row["s"].append(statistics.median(each))
                    row["us"].append(spent_us)
    return [
        {
            "name": name,
            "params": {"connections": connections, **common},
            "requests_per_s": statistics.median(row["rate"]),
            "seconds": row["s"],
            "median_s": statistics.median(row["s"]),
            "processor_us": statistics.median(row["us"]),
            "rounds_processor_us": row["us"],
        }
        for (name, connections), row in rows.items()
    ]


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    return (
        f"{row['name']:16} {row['params']['connections']:2} connections {row['requests_per_s']:8.0f} /s, "
        f"median {row['median_s'] * 1e3:.3f} ms, {row['processor_us']:.1f} us of the processor a request"
    )


def main() -> None:
    parser = make_parser("benchmarks.http_layers", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds (default %(default)s)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=4.0,
        help="seconds of load per server and round (default %(default)s)",
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants (default: all)"
    )
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, args.port)
        return
    with recording("http_layers", json=args.json, show=show) as out:
        out.add(*run(args.rounds, args.seconds, args.variants))


if __name__ == "__main__":
    main()
