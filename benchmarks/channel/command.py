"""The gateway-invoker channel beside kept libraries, between two processes on loopback.

`python -m benchmarks.channel --json FILE` measures, in turns: the latency of one call at a time, calls
a second with 16 and 64 in flight, and streams of tokens. Every contender carries the same messages
(registry.messages, encoded by msgspec) and tells calls apart by an id; the rivals have neither flow
control nor cancellation nor authentication, which the channel has. `floor` is a bare asyncio protocol
that echoes bytes of the same length: no multiplexing and no messages.
pyzmq and aiohttp are measured where they are installed.
"""

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.arguments import at_least, parser_of
from benchmarks.channel_contenders import Client, Contender, contenders, request_for
from benchmarks.machine import describe_machine, tell_records

STREAMS, TOKENS = 64, 400


def _process(
    serve: Callable[[Callable[[str], None]], Coroutine[None, None, None]], to_parent: Connection
) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(to_parent.send))


async def unary(client: Client, calls: int, in_flight: int) -> list[float]:
    """The seconds that each of `calls` calls took, `in_flight` at a time."""
    request = request_for(1)
    left = iter(range(calls))
    seconds: list[float] = []

    async def caller() -> None:
        for _ in left:
            started = time.perf_counter()
            assert await client.call(request) == 1
            seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return seconds


async def streams(client: Client, count: int, tokens: int) -> list[float]:
    """Read `count` streams of `tokens` tokens at once."""
    request = request_for(tokens)
    for got in await asyncio.gather(*(client.call(request) for _ in range(count))):
        if got != tokens:
            raise RuntimeError(f"{got} of {tokens} tokens came")
    return []


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one figure: `items` calls or tokens moved in `wall_s`, for `cpu_s` of both processes."""

    items: int
    wall_s: float
    cpu_s: float
    each_s: list[float]  # of single calls, where they were timed


async def _sample(server: psutil.Process, items: int, work: Awaitable[list[float]]) -> Sample:
    def cpu_s() -> float:
        theirs = server.cpu_times()
        return time.process_time() + theirs.user + theirs.system

    cpu_before, started = cpu_s(), time.perf_counter()
    each_s = await work
    return Sample(items, time.perf_counter() - started, cpu_s() - cpu_before, each_s)


async def measure(contender: Contender, url: str, pid: int, calls: int) -> dict[str, Sample]:
    """One round of every figure."""
    server = psutil.Process(pid)
    async with contender.connect(url) as client:
        await unary(client, calls // 4, 1)
        out = {"echo": await _sample(server, calls, unary(client, calls, 1))}
        if contender.name != "floor":
            for in_flight in (16, 64):
                work = unary(client, 4 * calls, in_flight)
                out[f"unary-{in_flight}"] = await _sample(server, 4 * calls, work)
            out["stream"] = await _sample(server, STREAMS * TOKENS, streams(client, STREAMS, TOKENS))
        return out


def run(rounds: int, calls: int) -> list[dict[str, object]]:
    """Measure all contenders in turns, each against a fresh server process every round."""
    spawn = multiprocessing.get_context("spawn")
    gathered: dict[tuple[str, str], list[Sample]] = {}
    for _ in range(rounds):
        for contender in contenders():
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_process, args=(contender.serve, theirs), daemon=True)
            process.start()
            try:
                assert process.pid is not None
                samples = uvloop.run(measure(contender, mine.recv(), process.pid, calls))
            finally:
                process.terminate()
                process.join()
            for figure, sample in samples.items():
                gathered.setdefault((figure, contender.name), []).append(sample)
    limit_s = statistics.median(s for sample in gathered["echo", "floor"] for s in sample.each_s)
    common = {"rounds": rounds, "calls": calls, **describe_machine("benchmarks.channel")}
    return [
        _record(figure, name, samples, limit_s, common)
        for (figure, name), samples in sorted(gathered.items())
    ]


def _record(
    figure: str, name: str, samples: list[Sample], limit_s: float, common: dict[str, object]
) -> dict[str, object]:
    record: dict[str, object] = {
        "name": name,
        "params": {"figure": figure, **common},
        "cpu_us_per_item": statistics.median(1e6 * sample.cpu_s / sample.items for sample in samples),
    }
    if figure == "echo":
        each_s = sorted(s for sample in samples for s in sample.each_s)
        median_s = statistics.median(each_s)
        return record | {
            "seconds": [statistics.median(sample.each_s) for sample in samples],
            "median_s": median_s,
            "p99_s": each_s[int(0.99 * len(each_s))],
            "limit_s": limit_s,
            "ratio_to_limit": median_s / limit_s,
        }
    return record | {
        "seconds": [sample.wall_s for sample in samples],
        "median_s": statistics.median(sample.wall_s for sample in samples),
        "per_second": statistics.median(sample.items / sample.wall_s for sample in samples),
    }


def show(record: dict[str, Any]) -> str:
    """One line for people."""
    if "per_second" in record:
        figure = f"{record['per_second']:10,.0f} /s"
    else:
        figure = f"{record['median_s'] * 1e6:7.1f} us, p99 {record['p99_s'] * 1e6:.1f} us"
    cpu = f"{record['cpu_us_per_item']:6.1f} us of processor each"
    return f"{record['params']['figure']:10} {record['name']:18} {figure:30} {cpu}"


def main() -> None:
    parser = parser_of("benchmarks.channel", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--calls", type=at_least(4), default=4000)
    args = parser.parse_args()
    records = run(args.rounds, args.calls)
    tell_records(records, show, args.json)


if __name__ == "__main__":
    main()
