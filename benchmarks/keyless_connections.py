"""Measure what connections without a key cost a gateway: its memory with them and a minute after.

Opens many connections of each kind to a gateway of a running platform: idle ones, heads and bodies that never
end, thousands of pipelined requests, and requests of which no response is read. A caller with a key calls
meanwhile. Exits with 1 where the memory grew by more than `--grow-mib`, stayed more than `--stay` above
its size before, or the caller was not served.

example:
  python -m benchmarks.keyless_connections --connections 1000 --json keyless.json
"""

import asyncio
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import uvloop

from benchmarks.gateway_overhead import BODY, LoadTarget, generate_load, hypercast_target
from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, positive
from benchmarks.harness.records import Record, all_but, describe_run, recording
from gateway.http.connections import raise_descriptor_limit
from gateway.http.protocol import MAX_PIPELINED

_MIB = 1 << 20
_ASK = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
_CALLER_S = 20.0
SENT = {
    "idle": b"",
    "slow head": b"GET /livez HTTP/1.1\r\nx: ",
    "slow body": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    + bytes(65536),
    "pipelined": _ASK * 2000,
    "never reading": b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_PIPELINED + 1),
}


def _call(target: LoadTarget) -> float:
    """Call with the key; return how long it took, in seconds. Raises OSError."""
    url = f"http://127.0.0.1:{target.ports[0]}{target.path}"
    request = urllib.request.Request(url, data=BODY, headers={"authorization": f"Bearer {target.key}"})
    began_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=_CALLER_S) as response:
        response.read()
    return time.perf_counter() - began_s


async def _open(port: int, data: bytes, connections: int) -> list[socket.socket]:
    """Open the connections, send what each takes of the data, and read nothing."""
    loop, opened = asyncio.get_running_loop(), []
    for _ in range(connections):
        one = socket.socket()
        one.setblocking(False)
        await loop.sock_connect(one, ("127.0.0.1", port))
        opened.append(one)
        with suppress(OSError):
            one.send(data)
    return opened


def _gateway_process(port: int) -> psutil.Process:
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
            return psutil.Process(one.pid)
    raise RuntimeError(f"no process listens on port {port}")


def measure(target: LoadTarget, kind: str, connections: int, settle_s: float) -> Record:
    """Return the resident memory before, with and `settle_s` after the connections, in bytes."""
    gateway = _gateway_process(target.ports[0])
    before = gateway.memory_info().rss
    opened = asyncio.run(_open(target.ports[0], SENT[kind], connections))
    try:
        calls_s, most = [], before
        until_s = time.monotonic() + 5.0
        while time.monotonic() < until_s:
            calls_s.append(_call(target))
            most = max(most, gateway.memory_info().rss)
            time.sleep(0.1)
    finally:
        for one in opened:
            one.close()
    time.sleep(settle_s)
    after = gateway.memory_info().rss
    return {
        "name": kind,
        "before_bytes": before,
        "most_bytes": most,
        "after_bytes": after,
        "after_ratio": after / before,
        "caller_max_s": max(calls_s),
    }


def show(row: Record) -> str:
    """Format a record as one line."""
    before, most, after = (f"{row[n] / _MIB:.0f} MiB" for n in ("before_bytes", "most_bytes", "after_bytes"))
    return (
        f"{row['name']:14} {before:>7} before, {most:>7} with, {after:>7} after ({row['after_ratio']:.2f}); "
        f"a call with a key took at most {row['caller_max_s'] * 1e3:.0f} ms"
    )


def over(rows: Sequence[Record], grow_mib: float, stay: float) -> list[str]:
    """Return what each record has over its limit."""
    found = []
    for row in rows:
        if row["most_bytes"] - row["before_bytes"] > grow_mib * _MIB:
            found.append(f"{row['name']}: grew by more than {grow_mib:g} MiB")
        if row["after_ratio"] > 1 + stay:
            found.append(f"{row['name']}: stays more than {stay:.0%} above its size before")
    return found


def main() -> None:
    parser = benchmark_parser("benchmarks.keyless_connections", __doc__)
    parser.add_argument("--connections", type=at_least(1), default=1000, help="of each kind")
    parser.add_argument(
        "--kinds", type=comma_list(str, tuple(SENT)), default=list(SENT), help="comma-separated"
    )
    parser.add_argument(
        "--settle", type=positive, default=60.0, help="seconds from their end to the measurement"
    )
    parser.add_argument("--grow-mib", type=positive, default=150.0, help="most growth")
    parser.add_argument("--stay", type=positive, default=0.2, help="most growth that stays, as a share")
    args = parser.parse_args()
    raise_descriptor_limit()
    params = all_but(args) | describe_run("benchmarks.keyless_connections")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hypercast-keyless-")))
        target = stack.enter_context(hypercast_target(folder, 1))
        uvloop.run(generate_load(target, 16, 2.0))  # what a gateway in use has allocated
        out = stack.enter_context(recording("keyless_connections", json=args.json, show=show))
        for kind in args.kinds:
            out.add(measure(target, kind, args.connections, args.settle) | {"params": params})
        bad = over(out.records, args.grow_mib, args.stay)
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
