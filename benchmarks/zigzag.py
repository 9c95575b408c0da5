"""Measure the throughput of an overloaded instance with the help of a node that is loading the model.

Everything is real except the accelerators, which are emulated (docs/OPERATIONS.md): gateway, nodes, image,
cast and sockets. First one node serves more concurrent requests than it can run, which gives its own rate.
Then a second node loads the model over a slow link with `live: zigzag`, until it is ready. Every token is
compared with the emulated model's. Times are model time: measured time divided by --slower.

The record has, for each eighth of the load, the throughput of both nodes relative to the first one's own, and
as `gain` that of the third quarter, in which the target has half of the layers or more.

examples:
  python -m benchmarks.zigzag --json zigzag.json
  python -m benchmarks.zigzag --emulated h800-llama2-7b/1000 --prompt-tokens 1000
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import uvloop

from benchmarks.harness.admin_client import AdminClient, http_client, until
from benchmarks.harness.arguments import at_least, benchmark_parser, positive, say
from benchmarks.harness.local_platform import PLATFORM_FAILURES, LocalPlatform, running_platform
from benchmarks.harness.records import chosen, describe_run, recording
from benchmarks.scaleout.client import Burst, BurstAnswer, request_completion
from benchmarks.scaleout.cluster import FUNCTION
from benchmarks.scaleout.scenarios import (
    add_emulated,
    burst_of,
    emulated_device,
    emulated_model,
    parse_emulated,
)
from invoker.emulated.profiles import Profile

PARTS = 8
_WARM_UP = 3  # uncounted requests


@dataclass(slots=True)
class LoadTimeline:
    """When requests ended, by the client's clock, and when the load started and ended."""

    ends_s: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    started_s: float = 0.0
    ready_s: float = 0.0

    def rate(self, from_s: float, to_s: float) -> float:
        """Return requests per second between two times, from the end of one request to another's."""
        ends = [end for end in self.ends_s if from_s <= end < to_s]
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0

    def part(self, first: float, last: float) -> float:
        """Return the rate during the fraction `[first, last)` of the load."""
        length = self.ready_s - self.started_s
        return self.rate(self.started_s + first * length, self.started_s + last * length)


@asynccontextmanager
async def load(
    platform: LocalPlatform, burst: Burst, seen: LoadTimeline
) -> AsyncIterator[httpx2.AsyncClient]:
    """Keep `burst.requests` requests in flight."""
    numbers = iter(range(1 << 20))

    async def send_requests(client: httpx2.AsyncClient) -> None:
        while True:
            answer = BurstAnswer()
            await request_completion(client, burst, next(numbers), time.monotonic(), answer)
            seen.ends_s.append(time.perf_counter())
            seen.kinds.append(answer.start_kind)
            if answer.failure:
                seen.failed.append(answer.failure)
                await asyncio.sleep(0.1)

    async with http_client(platform.url, platform.admin_key, burst.timeout_s) as client:
        tasks = [asyncio.create_task(send_requests(client)) for _ in range(burst.requests)]
        try:
            yield client
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def measure(platform: LocalPlatform, args: Namespace, burst: Burst) -> dict[str, Any]:
    """Measure one node alone, then with the loading node. Raises PlatformStateError."""
    alone, helped = LoadTimeline(), LoadTimeline()
    async with load(platform, burst, alone) as client:
        admin = AdminClient(client)

        async def enough() -> bool:
            return len(alone.ends_s) >= args.own + _WARM_UP

        await until(f"one node has served {args.own} requests", enough, args.patience)
    say(f"alone {alone.rate(alone.ends_s[_WARM_UP - 1], float('inf')) * args.slower:.2f} requests/s")
    async with load(platform, burst, helped) as client:
        admin = AdminClient(client)
        helped.started_s = time.perf_counter()
        scaling = {"scaling": {"live": "zigzag", "max_instances": 2, "min_instances": 2}}
        response = await client.patch(f"/admin/functions/{FUNCTION}", json=scaling)
        response.raise_for_status()

        async def paired() -> bool:
            return bool(await admin.pipelines(FUNCTION))

        await until("the nodes are a pair", paired, args.patience)
        say(f"paired after {time.perf_counter() - helped.started_s:.1f} s")

        async def ready() -> bool:
            states = await admin.states(FUNCTION)
            return list(states.values()) == ["ready", "ready"]

        await until("the other node is ready", ready, args.patience)
        helped.ready_s = time.perf_counter()
    return record_of(alone, helped, args)


def record_of(alone: LoadTimeline, helped: LoadTimeline, args: Namespace) -> dict[str, Any]:
    own = alone.rate(alone.ends_s[_WARM_UP - 1], float("inf"))
    gains = [helped.part(part / PARTS, (part + 1) / PARTS) / own for part in range(PARTS)]
    return {
        "name": "zigzag",
        "own_per_s": round(own * args.slower, 3),
        "load_s": round((helped.ready_s - helped.started_s) / args.slower, 3),
        "gain": round(helped.part(0.5, 0.75) / own, 3),
        "gain_by_part": [round(gain, 3) for gain in gains],
        "requests": len(alone.ends_s) + len(helped.ends_s),
        "live": helped.kinds.count("live"),
        "failed": [*alone.failed, *helped.failed][:10],
    }


async def run(platform: LocalPlatform, args: Namespace) -> dict[str, Any]:
    model = emulated_model(args)
    platform.command(
        *("deploy", model, "--name", FUNCTION, "--min-instances", "1", "--max-instances", "1"),
        *("--target-concurrency", str(args.requests), "--keep-alive", "1h", "--live", "off"),
    )
    burst = burst_of(args, model, args.profile.model.vocabulary, args.patience)
    return await measure(platform, args, burst)


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = benchmark_parser("benchmarks.zigzag", __doc__)
    add = parser.add_argument
    add_emulated(parser, slower=40)
    add("--load", type=positive, default=4.0, help="duration of the load in model seconds")
    add("--requests", type=at_least(2), default=12, help="concurrent requests")
    add("--prompt-tokens", type=at_least(2), default=2000, help="tokens per prompt")
    add("--output-tokens", type=at_least(1), default=4, help="tokens per output")
    add("--own", type=at_least(4), default=20, help="requests that measure one node's own rate")
    add("--patience", type=positive, default=600.0, help="seconds until a step times out")
    return parse_emulated(parser, arguments)


def main() -> None:
    args = parse()
    profile: Profile = args.profile
    params = {
        "emulated": str(profile),
        **chosen(args, "slower", "requests", "prompt_tokens", "output_tokens"),
        **describe_run("benchmarks.zigzag"),
    }
    bits_per_s = 8 * profile.image_bytes / (args.load * args.slower)
    flags = ("--device", str(emulated_device(args)), "--link-rate", f"{int(bits_per_s)}bit")
    memory = ("--gpu-memory", "512MiB", "--host-memory", "256MiB")
    with (
        recording("zigzag", json=args.json, show=show, failures=PLATFORM_FAILURES) as out,
        running_platform(None, *flags, *memory, nodes=2) as platform,
    ):
        out.add({"params": params, **uvloop.run(run(platform, args))})
    if failed := out.records[0]["failed"]:
        sys.exit(f"zigzag: {len(failed)} requests failed, the first: {failed[0]}")


def show(record: dict[str, Any]) -> str:
    """Format the record's figures."""
    return f"emulated: { {key: value for key, value in record.items() if key != 'params'} }"


if __name__ == "__main__":
    main()
