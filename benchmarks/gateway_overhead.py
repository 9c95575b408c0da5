"""Measure what the platform adds to a call: an echo through gateway and node, beside bare servers.

Serves the same JSON echo in turns from `hypercast` (the built-in echo: a key is checked, a node is called,
and the record is in the ledger before the response ends), from `starlette` (uvicorn with uvloop and
httptools, configured as the gateway's) and from `litserve` (defaults for one CPU worker; skipped with a note
where it is not installed: `pip install litserve`). One client without an HTTP library, in a process of its
own, loads all of them over the same number of kept-alive connections, each with one request in flight.

example:
  python -m benchmarks.gateway_overhead --rounds 5 --seconds 4 --json overhead.json
"""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.harness.arguments import at_least, make_parser, positive
from benchmarks.harness.local_platform import free_port, running_platform
from benchmarks.harness.records import describe_run, recording

BODY = json.dumps({"message": "x" * 100}, separators=(",", ":")).encode()
ECHO = json.loads(BODY)
START_S = 60.0

_STARLETTE = """
import sys, uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

async def echo(request: Request) -> JSONResponse:
    return JSONResponse(await request.json())

app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
uvicorn.run(app, port=int(sys.argv[1]), loop="uvloop", http="httptools", log_config=None, access_log=False)
"""

_LITSERVE = """
import sys
import litserve

class Echo(litserve.LitAPI):
    def setup(self, device): pass
    def decode_request(self, request): return request
    def predict(self, x): return x
    def encode_response(self, output): return output

if __name__ == "__main__":
    litserve.LitServer(Echo(api_path="/echo"), accelerator="cpu").run(
        host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """A server under load; `pids` are the processes that serve it, if they are known."""

    name: str
    ports: tuple[int, ...]
    path: str
    key: str = ""
    pids: tuple[int, ...] = ()

    @property
    def request(self) -> bytes:
        lines = [
            f"POST {self.path} HTTP/1.1",
            "host: 127.0.0.1",
            "content-type: application/json",
            f"content-length: {len(BODY)}",
        ]
        if self.key:
            lines.append(f"authorization: Bearer {self.key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + BODY


@dataclass(slots=True)
class ServerSamples:
    """All rounds of one server at one number of connections."""

    requests_per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class LoadConnection(asyncio.Protocol):
    """A kept-alive connection that sends the next request when a response is complete."""

    def __init__(self, request: bytes, until_s: float) -> None:
        self._request = request
        self._until_s = until_s
        self._buffer = b""
        self._sent_s = 0.0
        self.took_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        if not head.startswith(b"HTTP/1.1 200") or (body != BODY and json.loads(body) != ECHO):
            self._finish(RuntimeError(f"not an echo: {self._buffer[:500]!r}"))
            return
        self._buffer = b""
        now_s = time.perf_counter()
        self.took_s.append(now_s - self._sent_s)
        if now_s >= self._until_s:
            self._finish(None)
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
            self._transport.close()


async def generate_load(target: LoadTarget, connections: int, seconds: float) -> tuple[float, list[float]]:
    """Load the server; return requests per second and the seconds of each."""
    loop = asyncio.get_running_loop()
    started_s = time.perf_counter()
    made = [
        await loop.create_connection(
            lambda: LoadConnection(target.request, started_s + seconds),
            "127.0.0.1",
            target.ports[number % len(target.ports)],
        )
        for number in range(connections)
    ]
    clients = [client for _, client in made]
    await asyncio.gather(*(client.done for client in clients))
    took_s = time.perf_counter() - started_s
    each = [one for client in clients for one in client.took_s]
    return len(each) / took_s, each


@contextmanager
def run_script(name: str, source: str, folder: Path) -> Iterator[LoadTarget]:
    """Run a rival server from a small script."""
    port = free_port()
    path = folder / f"{name}_server.py"
    path.write_text(source)
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, path, str(port)], stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        target = LoadTarget(name=name, ports=(port,), path="/echo")
        deadline = time.monotonic() + START_S
        while not is_ready(target):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield target
    finally:
        # LitServe leaves workers behind on SIGTERM.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_ready(target: LoadTarget) -> bool:
    try:
        uvloop.run(generate_load(target, 1, 0.0))
    except OSError:
        return False
    return True


@contextmanager
def hypercast_target(folder: Path, gateways: int, *flags: str) -> Iterator[LoadTarget]:
    """Run ours: one node, with keys and ledger, and with these flags of `hypercast up`."""
    # No model is loaded: with small tiers nothing is pre-faulted during the measurement.
    memory = ("--gpu-memory", "64MiB", "--host-memory", "64MiB")
    with running_platform(folder / "data", *memory, *flags, nodes=1, gateways=gateways) as platform:
        scaling = ("--min-instances", "1", "--target-concurrency", "256")
        platform.command("deploy", "builtin:echo", "--name", "echo", *scaling)
        ports = tuple(int(url.rsplit(":", 1)[1]) for url in platform.urls)
        path, key = "/functions/echo/invoke", platform.admin_key
        found = platform.processes()
        pids = tuple(found[one.name].pid for one in (*platform.gateways, *platform.nodes))
        yield LoadTarget(name="hypercast", ports=ports, path=path, key=key, pids=pids)


def measure(
    targets: Sequence[LoadTarget], rounds: int, seconds: float
) -> dict[tuple[str, int], ServerSamples]:
    samples: dict[tuple[str, int], ServerSamples] = {}
    for target in targets:
        uvloop.run(generate_load(target, 16, min(2.0, seconds)))  # warm-up
    for number in range(rounds):
        for connections in (1, 16):
            for target in targets:
                rate, each = uvloop.run(generate_load(target, connections, seconds))
                sample = samples.setdefault((target.name, connections), ServerSamples())
                sample.requests_per_s.append(rate)
                sample.seconds.append(statistics.median(each))
                print(
                    f"round {number + 1}/{rounds} {target.name:9} {connections:2} connections "
                    f"{rate:8.0f} requests/s, median {statistics.median(each) * 1e3:.2f} ms",
                    file=sys.stderr,
                )
    return samples


def records(samples: dict[tuple[str, int], ServerSamples], common: dict[str, object]) -> list[dict[str, Any]]:
    """Return a record per server and number of connections; `limit_s` is bare Starlette's time."""
    rows = []
    for (name, connections), sample in samples.items():
        bare = samples["starlette", connections]
        rate, limit_rate = statistics.median(sample.requests_per_s), statistics.median(bare.requests_per_s)
        median_s, limit_s = statistics.median(sample.seconds), statistics.median(bare.seconds)
        rows.append(
            {
                "name": name,
                "params": {"connections": connections, "body_bytes": len(BODY), **common},
                "requests_per_s": rate,
                "rounds_requests_per_s": sample.requests_per_s,
                "seconds": sample.seconds,
                "median_s": median_s,
                "limit_s": limit_s,
                "ratio_to_limit": median_s / limit_s,
                "added_s": median_s - limit_s,
                "share_of_starlette": rate / limit_rate,
            }
        )
    return rows


def run(rounds: int, seconds: float, gateways: int) -> list[dict[str, Any]]:
    common: dict[str, object] = {"rounds": rounds, "round_s": seconds, "gateways": gateways}
    common |= describe_run("benchmarks.gateway_overhead")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hypercast-overhead-")))
        targets = [
            stack.enter_context(run_script("starlette", _STARLETTE, folder)),
            stack.enter_context(hypercast_target(folder, gateways)),
        ]
        if importlib.util.find_spec("litserve") is not None:
            targets.append(stack.enter_context(run_script("litserve", _LITSERVE, folder)))
        else:
            print("SKIPPED litserve: not installed (pip install litserve)", file=sys.stderr)
        return records(measure(targets, rounds, seconds), common)


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    return (
        f"{row['name']:9} {row['params']['connections']:2} connections "
        f"{row['requests_per_s']:8.0f} requests/s ({row['share_of_starlette']:.2f} of bare Starlette), "
        f"median {row['median_s'] * 1e3:.2f} ms ({row['added_s'] * 1e3:+.2f} ms)"
    )


def main() -> None:
    parser = make_parser("benchmarks.gateway_overhead", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds (default %(default)s)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=4.0,
        help="seconds of load per server and round (default %(default)s)",
    )
    parser.add_argument(
        "--gateways", type=at_least(1), default=1, help="gateway processes of hypercast (default %(default)s)"
    )
    args = parser.parse_args()
    with recording("gateway_overhead", json=args.json, show=show) as out:
        out.add(*run(args.rounds, args.seconds, args.gateways))


if __name__ == "__main__":
    main()
