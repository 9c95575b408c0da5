"""Compare the gateway-invoker channel with established libraries, between two processes on loopback.

Measured in turns: the latency of one call at a time, calls per second with 16 and 64 in flight, and token
streams. Every contender carries the same messages (registry.messages.node, encoded by msgspec) and matches
replies to calls by id; the rivals have no flow control, cancellation or authentication, which the channel
has. `floor` is a bare asyncio protocol that echoes bytes of the same length, without multiplexing or
messages. pyzmq and aiohttp are measured where they are installed.

example:
  python -m benchmarks.channel --rounds 5 --json channel.json
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import psutil
import uvloop

from benchmarks.channel.contenders import ChannelContender, ContenderClient, contenders, request_for
from benchmarks.harness.arguments import at_least, benchmark_parser
from benchmarks.harness.crew import running_children
from benchmarks.harness.crew_messages import NO_ORDERS
from benchmarks.harness.records import describe_run, recording, timed

STREAMS, TOKENS = 64, 400


async def unary(client: ContenderClient, calls: int, in_flight: int) -> list[float]:
    """Make `calls` calls, `in_flight` at a time, and return the seconds of each."""
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


async def streams(client: ContenderClient, count: int, tokens: int) -> list[float]:
    """Read `count` concurrent streams of `tokens` tokens."""
    request = request_for(tokens)
    for got in await asyncio.gather(*(client.call(request) for _ in range(count))):
        if got != tokens:
            raise RuntimeError(f"received {got} of {tokens} tokens")
    return []


@dataclass(frozen=True, slots=True)
class ChannelSample:
    """One round of one figure: `items` calls or tokens in `wall_s`, for `cpu_s` of both processes."""

    items: int
    wall_s: float
    cpu_s: float
    each_s: list[float]  # of single calls, where timed


async def _measure_sample(server: psutil.Process, items: int, work: Awaitable[list[float]]) -> ChannelSample:
    def cpu_s() -> float:
        theirs = server.cpu_times()
        return time.process_time() + theirs.user + theirs.system

    cpu_before, started = cpu_s(), time.perf_counter()
    each_s = await work
    return ChannelSample(items, time.perf_counter() - started, cpu_s() - cpu_before, each_s)


async def measure(contender: ChannelContender, url: str, pid: int, calls: int) -> dict[str, ChannelSample]:
    """Measure one round of every figure."""
    server = psutil.Process(pid)
    async with contender.connect(url) as client:
        await unary(client, calls // 4, 1)
        out = {"echo": await _measure_sample(server, calls, unary(client, calls, 1))}
        if contender.name != "floor":
            for in_flight in (16, 64):
                work = unary(client, 4 * calls, in_flight)
                out[f"unary-{in_flight}"] = await _measure_sample(server, 4 * calls, work)
            out["stream"] = await _measure_sample(server, STREAMS * TOKENS, streams(client, STREAMS, TOKENS))
        return out


def run(rounds: int, calls: int) -> list[dict[str, object]]:
    """Measure all contenders in turns, each against a new server process per round."""
    gathered: dict[tuple[str, str], list[ChannelSample]] = {}
    for _ in range(rounds):
        for contender in contenders():
            child = running_children("benchmarks.channel.contenders", NO_ORDERS, (contender.name,))
            with child as crew:
                server = crew.hellos[0]
                samples = uvloop.run(measure(contender, server.url, server.pid, calls))
            for figure, sample in samples.items():
                gathered.setdefault((figure, contender.name), []).append(sample)
    limit_s = statistics.median(s for sample in gathered["echo", "floor"] for s in sample.each_s)
    common = {"rounds": rounds, "calls": calls, **describe_run("benchmarks.channel")}
    return [
        _record(figure, name, samples, limit_s, common)
        for (figure, name), samples in sorted(gathered.items())
    ]


def _record(
    figure: str, name: str, samples: list[ChannelSample], limit_s: float, common: dict[str, object]
) -> dict[str, object]:
    params = {"figure": figure, **common}
    cpu_us = statistics.median(1e6 * sample.cpu_s / sample.items for sample in samples)
    if figure == "echo":
        each_s = sorted(s for sample in samples for s in sample.each_s)
        rounds_s = [statistics.median(sample.each_s) for sample in samples]
        median_s = statistics.median(each_s)  # of all calls, not of the rounds
        medians = {"median_s": median_s, "p99_s": each_s[int(0.99 * len(each_s))]}
        medians["ratio_to_limit"] = median_s / limit_s
        return timed(name, params, rounds_s, limit_s, cpu_us_per_item=cpu_us) | medians
    per_second = statistics.median(sample.items / sample.wall_s for sample in samples)
    walls_s = [sample.wall_s for sample in samples]
    return timed(name, params, walls_s, cpu_us_per_item=cpu_us, per_second=per_second)


def show(record: dict[str, Any]) -> str:
    """Format a record as one line."""
    if "per_second" in record:
        figure = f"{record['per_second']:10,.0f} /s"
    else:
        figure = f"{record['median_s'] * 1e6:7.1f} us, p99 {record['p99_s'] * 1e6:.1f} us"
    cpu = f"{record['cpu_us_per_item']:6.1f} us CPU each"
    return f"{record['params']['figure']:10} {record['name']:18} {figure:30} {cpu}"


def main() -> None:
    parser = benchmark_parser("benchmarks.channel", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds per contender")
    parser.add_argument("--calls", type=at_least(4), default=4000, help="calls per round")
    args = parser.parse_args()
    with recording("channel", json=args.json, show=show) as out:
        out.add(*run(args.rounds, args.calls))


if __name__ == "__main__":
    main()
