"""Measure the throughput of an overloaded instance with the help of a node that is loading the model.

Everything is real except the accelerators, which are emulated (docs/OPERATIONS.md): gateway, nodes, image,
cast and sockets. First one node serves more concurrent requests than it can run, which gives its own rate.
Then, in each of --rounds, a second node loads the model over a link with `live: zigzag` until it is ready,
and leaves. Prompts have different lengths, and throughput is that of prompt tokens: those of the prompts
whose first tokens come in one step count evenly since the step before. Every token is compared with the
emulated model's. Times are model time: measured time divided by --slower.

The record has, for each eighth of the load, the throughput of both nodes relative to the first one's own,
over all rounds: `gain_by_part`, beside `theory_by_part`: a source which leaves the loaded layers to the
target has 1 / (1 - loaded) of its own throughput, 2 at most (BlitzScale §4). `gain` is that of the third
quarter.

examples:
  python -m benchmarks.zigzag --json zigzag.json
  python -m benchmarks.zigzag --load 4 --rounds 2 --prompt-tokens 2000
"""

import asyncio
import math
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import uvloop
from msgspec import structs

from benchmarks.harness.admin_client import AdminClient, http_client, until
from benchmarks.harness.arguments import at_least, benchmark_parser, positive, say
from benchmarks.harness.local_platform import PLATFORM_FAILURES, LocalPlatform, running_platform
from benchmarks.harness.records import chosen, describe_run, recording
from benchmarks.scaleout.client import Burst, BurstAnswer, request_completion
from benchmarks.scaleout.cluster import FUNCTION
from benchmarks.scaleout.scenarios import (
    add_emulated,
    emulated_device,
    emulated_model,
    parse_emulated,
)
from invoker.emulated.profiles import Profile

PARTS = 8
_WARM_UP = 3  # uncounted requests
_TOGETHER_S = 5e-3  # between first tokens of one step, of the model's time: less than any step takes
_LENGTHS = (200, 1000, 400, 600)


@dataclass(slots=True)
class PromptTimes:
    """When prompts had been run, by the client's clock, with their tokens.

    Those which follow each other within `together_s` are of one step.
    """

    together_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def tokens(self, from_s: float, to_s: float) -> float:
        """Return the tokens that were run between two times: those of a step evenly since the one before."""
        times, counts = zip(*self._steps(), strict=True)
        before, behind = np.interp((from_s, to_s), times, counts)
        return float(behind - before)

    def _steps(self) -> list[tuple[float, int]]:
        """Return the times of steps, and the tokens of all prompts until then."""
        steps: list[tuple[float, int]] = []
        done = 0
        for end, tokens in sorted(self.ends):
            done += tokens
            if steps and end - steps[-1][0] <= self.together_s:
                steps.pop()
            steps.append((end, done))
        return steps

    def own_rate(self) -> float:
        """Return the prompt tokens per second without the first requests."""
        ends = sorted(self.ends)[_WARM_UP - 1 :]
        return sum(tokens for _, tokens in ends[1:]) / (ends[-1][0] - ends[0][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """When a load started and ended."""

    started_s: float
    ready_s: float

    def at(self, part: float) -> float:
        """Return the time at which a part of the load has passed."""
        return self.started_s + part * (self.ready_s - self.started_s)


def gain(seen: PromptTimes, loads: Sequence[LoadTimes], own: float, first: float, last: float) -> float:
    """Return the throughput in the parts `[first, last)` of all loads, relative to `own`."""
    tokens = sum(seen.tokens(one.at(first), one.at(last)) for one in loads)
    return tokens / sum(one.at(last) - one.at(first) for one in loads) / own


def theory(first: float, last: float) -> float:
    """Return the mean gain in theory while the loaded part of the layers grows from `first` to `last`."""
    turn = min(max(0.5, first), last)  # from half of the layers on, the target need not run all that it has
    growing = math.log((1 - first) / (1 - turn)) if first < turn else 0.0
    return (growing + 2 * (last - turn)) / (last - first)


@asynccontextmanager
async def load(
    platform: LocalPlatform, bursts: Sequence[Burst], seen: PromptTimes
) -> AsyncIterator[httpx2.AsyncClient]:
    """Keep requests in flight, with prompts of the bursts in turn."""
    numbers = iter(range(1 << 20))

    async def send_requests(client: httpx2.AsyncClient) -> None:
        while True:
            number, answer = next(numbers), BurstAnswer()
            burst, sent_s = bursts[number % len(bursts)], time.monotonic()
            await request_completion(client, burst, number, sent_s, answer)
            if answer.arrived_s:
                seen.ends.append((sent_s + answer.arrived_s[0], burst.prompt_tokens))
            seen.kinds.append(answer.start_kind)
            if answer.failure:
                seen.failed.append(answer.failure)
                await asyncio.sleep(0.1)

    async with http_client(platform.url, platform.admin_key, bursts[0].timeout_s) as client:
        tasks = [asyncio.create_task(send_requests(client)) for _ in range(bursts[0].requests)]
        try:
            yield client
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def measure(platform: LocalPlatform, args: Namespace, bursts: Sequence[Burst]) -> dict[str, Any]:
    """Measure one node alone, then with the loading node. Raises PlatformStateError."""
    seen, loads = PromptTimes(together_s=_TOGETHER_S * args.slower), list[LoadTimes]()
    async with load(platform, bursts, seen) as client:
        admin = AdminClient(client)
        await _set_instances(client, 1)

        async def enough() -> bool:
            return len(seen.ends) >= args.own + _WARM_UP

        await until(f"one node has served {args.own} requests", enough, args.patience)
        own = seen.own_rate()
        say(f"alone {own * args.slower:.0f} prompt tokens/s")
        for number in range(args.rounds):
            loads.append(await _round(client, admin, args.patience))
            now = gain(seen, loads[-1:], own, 0.5, 1.0)
            say(f"round {number + 1} of {args.rounds}: {now:.2f} in the second half")
    return record_of(seen, loads, own, args)


async def _round(client: httpx2.AsyncClient, admin: AdminClient, patience_s: float) -> LoadTimes:
    """Let a second node load the model, and leave without it."""
    await _set_instances(client, 2)

    async def loading() -> bool:
        return len(await admin.states(FUNCTION)) == 2

    async def ready() -> bool:
        return list((await admin.states(FUNCTION)).values()) == ["ready", "ready"]

    await until("another node loads the model", loading, patience_s)
    started_s = time.monotonic()
    await until("the other node is ready", ready, patience_s)
    load_times = LoadTimes(started_s=started_s, ready_s=time.monotonic())
    await _set_instances(client, 1)

    async def alone() -> bool:
        return len(await admin.states(FUNCTION)) == 1

    await until("one node is left", alone, patience_s)
    (serving,) = await admin.states(FUNCTION)
    others = [node["id"] for node in await admin.nodes() if node["id"] != serving]

    async def dropped() -> bool:
        for tier in ("gpu", "host"):
            await client.post(f"/admin/functions/{FUNCTION}/drop", json={"tier": tier, "on": others})
        nodes = await admin.nodes()
        held = [node["tiers"] for node in nodes if node["id"] in others]
        return not any(f"{FUNCTION}:1" in tiers[tier] for tiers in held for tier in ("gpu", "host"))

    await until("the other node has dropped the model", dropped, patience_s)
    return load_times


async def _set_instances(client: httpx2.AsyncClient, count: int) -> None:
    # Without a copy in host memory, from which the other node would load instead of from the first one.
    scaling = {
        "scaling": {"live": "zigzag", "max_instances": count, "min_instances": count, "host_copies": 0}
    }
    response = await client.patch(f"/admin/functions/{FUNCTION}", json=scaling)
    response.raise_for_status()


def record_of(seen: PromptTimes, loads: Sequence[LoadTimes], own: float, args: Namespace) -> dict[str, Any]:
    parts = [(part / PARTS, (part + 1) / PARTS) for part in range(PARTS)]
    return {
        "name": "zigzag",
        "own_per_s": round(own * args.slower, 1),
        "load_s": round(sum(one.ready_s - one.started_s for one in loads) / len(loads) / args.slower, 3),
        "gain": round(gain(seen, loads, own, 0.5, 0.75), 3),
        "second_half": round(gain(seen, loads, own, 0.5, 1.0), 3),
        "gain_by_part": [round(gain(seen, loads, own, *part), 3) for part in parts],
        "theory_by_part": [round(theory(*part), 3) for part in parts],
        "requests": len(seen.kinds),
        "live": seen.kinds.count("live"),
        "failed": seen.failed[:10],
    }


async def run(platform: LocalPlatform, args: Namespace) -> dict[str, Any]:
    model = emulated_model(args)
    platform.command(
        *("deploy", model, "--name", FUNCTION, "--min-instances", "1", "--max-instances", "1"),
        *("--keep-alive", "1h", "--live", "off"),
    )
    burst = Burst(
        model=FUNCTION,
        emulated=model,
        vocabulary=args.profile.model.vocabulary,
        requests=args.requests,
        prompt_tokens=0,
        output_tokens=args.output_tokens,
        timeout_s=args.patience,
    )
    return await measure(
        platform, args, [structs.replace(burst, prompt_tokens=tokens) for tokens in args.prompt_tokens]
    )


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(at_least(2)(word) for word in text.split(","))


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = benchmark_parser("benchmarks.zigzag", __doc__)
    add = parser.add_argument
    add_emulated(parser, slower=20)
    add("--rounds", type=at_least(1), default=12, help="loads")
    add("--load", type=positive, help="model seconds of a load (default: as the device's link takes)")
    add("--requests", type=at_least(2), default=48, help="concurrent requests")
    add("--prompt-tokens", type=_lengths, default=_LENGTHS, help="tokens per prompt, in turn (N,…)")
    add("--output-tokens", type=at_least(1), default=4, help="tokens per output")
    add("--own", type=at_least(4), default=60, help="requests that measure one node's own rate")
    add("--patience", type=positive, default=600.0, help="seconds until a step times out")
    return parse_emulated(parser, arguments)


def main() -> None:
    args = parse()
    profile: Profile = args.profile
    params = {
        "emulated": str(profile),
        **chosen(args, "slower", "rounds", "load", "requests", "prompt_tokens", "output_tokens"),
        **describe_run("benchmarks.zigzag"),
    }
    bytes_s = profile.image_bytes / args.load if args.load else profile.links.network / profile.scale
    bits_per_s = 8 * bytes_s / args.slower
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
