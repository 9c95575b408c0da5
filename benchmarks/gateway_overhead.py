"""What the platform adds to a call: an echo through gateway and node, beside servers without either.

`python -m benchmarks.gateway_overhead --json FILE` serves the same JSON echo in turns from `hypercast`
(the built-in echo: a key is checked, the call goes to a node and back, its record is in the ledger
before the answer ends), from `starlette` (uvicorn with uvloop and httptools, as the gateway runs it) and
from `litserve` (its default settings for one processor worker; left out, and said so, where it is not
installed: `pip install litserve`). One client of our own, a process without an HTTP library, loads
all of them over the same number of kept-alive connections, each with one request under way.
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

from benchmarks.arguments import at_least, parser_of, positive
from benchmarks.endings import end_politely
from benchmarks.machine import ROOT, describe_machine, write_records

BODY = json.dumps({"message": "x" * 100}, separators=(",", ":")).encode()
SAID = json.loads(BODY)
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
class Target:
    """A server under load."""

    name: str
    ports: tuple[int, ...]
    path: str
    key: str = ""

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
class Sample:
    """All rounds of one server at one number of connections."""

    requests_per_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One kept-alive connection that asks again as soon as it was answered."""

    def __init__(self, request: bytes, until_s: float) -> None:
        self._request = request
        self._until_s = until_s
        self._buffer = b""
        self._sent_s = 0.0
        self.took_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
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
        if not head.startswith(b"HTTP/1.1 200") or (body != BODY and json.loads(body) != SAID):
            self._end(RuntimeError(f"not an echo: {self._buffer[:500]!r}"))
            return
        self._buffer = b""
        now_s = time.perf_counter()
        self.took_s.append(now_s - self._sent_s)
        if now_s >= self._until_s:
            self._end(None)
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
            self._transport.close()


async def load(target: Target, connections: int, seconds: float) -> tuple[float, list[float]]:
    """Requests a second, and how long each took."""
    loop = asyncio.get_running_loop()
    began_s = time.perf_counter()
    made = [
        await loop.create_connection(
            lambda: Connection(target.request, began_s + seconds),
            "127.0.0.1",
            target.ports[number % len(target.ports)],
        )
        for number in range(connections)
    ]
    clients = [client for _, client in made]
    await asyncio.gather(*(client.done for client in clients))
    took_s = time.perf_counter() - began_s
    each = [one for client in clients for one in client.took_s]
    return len(each) / took_s, each


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def script(name: str, source: str, folder: Path) -> Iterator[Target]:
    """A rival: a small script with a server."""
    port = free_port()
    path = folder / f"{name}_server.py"
    path.write_text(source)
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, path, str(port)], stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        target = Target(name=name, ports=(port,), path="/echo")
        deadline = time.monotonic() + START_S
        while not answers(target):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield target
    finally:
        # LitServe leaves workers behind when it is asked politely.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(target: Target) -> bool:
    try:
        uvloop.run(load(target, 1, 0.0))
    except OSError:
        return False
    return True


@contextmanager
def platform(folder: Path, gateways: int) -> Iterator[Target]:
    """Ours: one node, keys and ledger on."""
    data = folder / "data"
    cli = [sys.executable, "-m", "cli"]
    # No model is loaded: the arena is small, so that nothing prepares it meanwhile.
    up_command = [*cli, "up", "--detach", "--port", "0", "--data-dir", str(data), "--nodes", "1"]
    up_command += ["--gateways", str(gateways), "--gpu-memory", "64MiB"]
    subprocess.run(
        up_command,
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        up = json.loads((data / "up.json").read_text())
        url = up["url"]
        key = (data / "admin.key").read_text().strip()
        env = {**os.environ, "HYPERCAST_URL": url, "HYPERCAST_API_KEY": key}
        deploy = [*cli, "deploy", "builtin:echo", "--name", "echo", "--min-instances", "1"]
        deploy += ["--target-concurrency", "256"]
        subprocess.run(
            deploy, cwd=ROOT, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ports = tuple(int(one.rsplit(":", 1)[1]) for one in up["urls"])
        yield Target(name="hypercast", ports=ports, path="/functions/echo/invoke", key=key)
    finally:
        subprocess.run([*cli, "down", "--data-dir", str(data)], cwd=ROOT, check=True)


def measure(targets: Sequence[Target], rounds: int, seconds: float) -> dict[tuple[str, int], Sample]:
    samples: dict[tuple[str, int], Sample] = {}
    for target in targets:
        uvloop.run(load(target, 16, min(2.0, seconds)))  # warm
    for number in range(rounds):
        for connections in (1, 16):
            for target in targets:
                rate, each = uvloop.run(load(target, connections, seconds))
                sample = samples.setdefault((target.name, connections), Sample())
                sample.requests_per_s.append(rate)
                sample.seconds.append(statistics.median(each))
                print(
                    f"round {number + 1}/{rounds} {target.name:9} {connections:2} connections "
                    f"{rate:8.0f} requests/s, median {statistics.median(each) * 1e3:.2f} ms",
                    file=sys.stderr,
                )
    return samples


def records(samples: dict[tuple[str, int], Sample], common: dict[str, object]) -> list[dict[str, Any]]:
    """One record a server and number of connections; `limit_s` is what bare Starlette takes."""
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
    common |= describe_machine("benchmarks.gateway_overhead")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hypercast-overhead-")))
        targets = [
            stack.enter_context(script("starlette", _STARLETTE, folder)),
            stack.enter_context(platform(folder, gateways)),
        ]
        if importlib.util.find_spec("litserve") is not None:
            targets.append(stack.enter_context(script("litserve", _LITSERVE, folder)))
        else:
            print("litserve is not installed: left out", file=sys.stderr)
        return records(measure(targets, rounds, seconds), common)


def main() -> None:
    end_politely()
    parser = parser_of("benchmarks.gateway_overhead", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument(
        "--seconds", type=positive, default=4.0, help="how long each server is loaded a round"
    )
    parser.add_argument(
        "--gateways", type=at_least(1), default=1, help="gateway processes of hypercast (default 1)"
    )
    args = parser.parse_args()
    rows = run(args.rounds, args.seconds, args.gateways)
    for row in rows:
        print(
            f"{row['name']:9} {row['params']['connections']:2} connections "
            f"{row['requests_per_s']:8.0f} requests/s ({row['share_of_starlette']:.2f} of bare Starlette), "
            f"median {row['median_s'] * 1e3:.2f} ms ({row['added_s'] * 1e3:+.2f} ms)"
        )
    if args.json:
        write_records(args.json, rows)


if __name__ == "__main__":
    main()
