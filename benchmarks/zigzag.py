"""An overloaded instance and a node that is loading: how much more prompts they run than the instance alone.

Everything is real but the accelerators, which are emulated (docs/OPERATIONS.md): gateway, nodes, image, cast
and sockets. First one node serves, with more requests under way than it can run: its own rate. Then a second
one loads the model over a slow link, by the setting `live: zigzag`, until it is ready. Every token is held
against what the model must say. Times are the model's: what was measured, divided by how many times slower
the devices are.

The record has, for each eighth of the load, what the two served beside the first one's own rate, and as
`gain` that of the third quarter, in which the target has half of the layers or more.

  python -m benchmarks.zigzag --json FILE
  python -m benchmarks.zigzag --emulated h800-llama2-7b/1000 --prompt-tokens 1000
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import SubprocessError
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import uvloop

from benchmarks.arguments import at_least, parser_of, positive, say
from benchmarks.chaos_cluster import Cluster
from benchmarks.endings import end_politely
from benchmarks.live_serving_cluster import NotThere, Stage, until
from benchmarks.machine import describe_machine, write_records
from benchmarks.scaleout_client import Answer, Burst, ask
from invoker.emulated.profiles import PROFILES, Profile, UnknownProfile, find_profile
from registry.emulation import EmulatedDevice, EmulatedModel

FUNCTION = "emulated"
PARTS = 8
_WARM_UP = 3  # requests that are not counted


@dataclass(slots=True)
class Seen:
    """When requests ended, by the client's clock, and when the load began and ended."""

    ends_s: list[float] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    began_s: float = 0.0
    ready_s: float = 0.0

    def rate(self, from_s: float, to_s: float) -> float:
        """Requests a second between two moments: from one's end to another's."""
        ends = [end for end in self.ends_s if from_s <= end < to_s]
        return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else 0.0

    def part(self, first: float, last: float) -> float:
        """Of the load, as parts of it."""
        length = self.ready_s - self.began_s
        return self.rate(self.began_s + first * length, self.began_s + last * length)


@asynccontextmanager
async def load(cluster: Cluster, burst: Burst, seen: Seen) -> AsyncIterator[httpx2.AsyncClient]:
    """So many requests are under way all the time."""
    headers = {"authorization": f"Bearer {cluster.admin_key}"}
    limits = httpx2.Limits(max_connections=None)
    numbers = iter(range(1 << 20))

    async def go_on(client: httpx2.AsyncClient) -> None:
        while True:
            answer = Answer()
            await ask(client, burst, next(numbers), time.monotonic(), answer)
            seen.ends_s.append(time.perf_counter())
            seen.kinds.append(answer.start_kind)
            if answer.failure:
                seen.failed.append(answer.failure)
                await asyncio.sleep(0.1)

    async with httpx2.AsyncClient(
        base_url=cluster.urls[0], headers=headers, limits=limits, timeout=burst.timeout_s, trust_env=False
    ) as client:
        tasks = [asyncio.create_task(go_on(client)) for _ in range(burst.requests)]
        try:
            yield client
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def measure(cluster: Cluster, args: Namespace, burst: Burst) -> dict[str, Any]:
    """Raises NotThere."""
    alone, helped = Seen(), Seen()
    async with load(cluster, burst, alone) as client:
        stage = Stage(client)

        async def enough() -> bool:
            return len(alone.ends_s) >= args.own + _WARM_UP

        await until("one node has served enough", enough, args.patience)
    say(f"alone {alone.rate(alone.ends_s[_WARM_UP - 1], float('inf')) * args.slower:.2f} requests/s")
    async with load(cluster, burst, helped) as client:
        stage = Stage(client)
        helped.began_s = time.perf_counter()
        wanted = {"scaling": {"live": "zigzag", "max_instances": 2, "min_instances": 2}}
        response = await client.patch(f"/admin/functions/{FUNCTION}", json=wanted)
        response.raise_for_status()

        async def paired() -> bool:
            return bool(await stage.pipelines(FUNCTION))

        await until("the nodes are a pair", paired, args.patience)
        say(f"paired after {time.perf_counter() - helped.began_s:.1f} s")

        async def ready() -> bool:
            states = await stage.states(FUNCTION)
            return list(states.values()) == ["ready", "ready"]

        await until("the other node is ready", ready, args.patience)
        helped.ready_s = time.perf_counter()
    return record_of(alone, helped, args)


def record_of(alone: Seen, helped: Seen, args: Namespace) -> dict[str, Any]:
    own = alone.rate(alone.ends_s[_WARM_UP - 1], float("inf"))
    gains = [helped.part(part / PARTS, (part + 1) / PARTS) / own for part in range(PARTS)]
    return {
        "name": "zigzag",
        "own_per_s": round(own * args.slower, 3),
        "load_s": round((helped.ready_s - helped.began_s) / args.slower, 3),
        "gain": round(helped.part(0.5, 0.75) / own, 3),
        "gain_by_part": [round(gain, 3) for gain in gains],
        "requests": len(alone.ends_s) + len(helped.ends_s),
        "live": helped.kinds.count("live"),
        "failed": [*alone.failed, *helped.failed][:10],
    }


async def run(cluster: Cluster, args: Namespace) -> dict[str, Any]:
    model = EmulatedModel(name=args.emulated.partition("-")[2].partition("/")[0], scale=args.profile.scale)
    cluster.command(
        *("deploy", str(model), "--name", FUNCTION, "--min-instances", "1", "--max-instances", "1"),
        *("--target-concurrency", str(args.requests), "--keep-alive", "1h", "--live", "off"),
    )
    burst = Burst(
        model=FUNCTION,
        emulated=str(model),
        vocabulary=args.profile.model.vocabulary,
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        timeout_s=args.patience,
    )
    return await measure(cluster, args, burst)


def device_of(args: Namespace) -> EmulatedDevice:
    name, profile = args.emulated.partition("-")[0], args.profile
    return EmulatedDevice(name=name, count=profile.gpus, scale=profile.scale, slower=args.slower)


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = parser_of("benchmarks.zigzag", __doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the record to this file")
    add("--emulated", default="h800-llama2-13b/1000", metavar="PROFILE", help=f"of {', '.join(PROFILES)}")
    add("--slower", type=at_least(1), default=40, help="times that devices and the load are (default 40)")
    add("--load", type=positive, default=4.0, help="seconds of the model's time (default 4)")
    add("--requests", type=at_least(2), default=12, help="under way at once (default 12)")
    add("--prompt-tokens", type=at_least(2), default=2000, help="of each (default 2000)")
    add("--output-tokens", type=at_least(1), default=4, help="of each (default 4)")
    add("--own", type=at_least(4), default=20, help="requests for the rate of one node (default 20)")
    add("--patience", type=positive, default=600.0, help="seconds after which a step has failed")
    args = parser.parse_args(arguments)
    try:
        args.profile = find_profile(args.emulated)
    except UnknownProfile as error:
        parser.error(str(error))
    return args


def main() -> None:
    end_politely()
    args = parse()
    profile: Profile = args.profile
    params = {
        "emulated": str(profile),
        **{name: getattr(args, name) for name in ("slower", "requests", "prompt_tokens", "output_tokens")},
        **describe_machine("benchmarks.zigzag"),
    }
    bits_per_s = 8 * profile.image_bytes / (args.load * args.slower)
    with TemporaryDirectory(prefix="hypercast-zigzag-") as folder:
        cluster = Cluster(Path(folder), nodes=2, gateways=1)
        try:
            memory = ("--gpu-memory", "512MiB", "--host-memory", "256MiB")
            cluster.up("--device", str(device_of(args)), "--link-rate", f"{int(bits_per_s)}bit", *memory)
            record = {"params": params, **uvloop.run(run(cluster, args))}
        except (NotThere, RuntimeError, OSError, SubprocessError, httpx2.HTTPError) as error:
            sys.exit(f"zigzag: {error!r}")
        finally:
            with suppress(RuntimeError):  # nothing came up
                cluster.down()
    print("emulated:", {key: value for key, value in record.items() if key != "params"})
    if args.json:
        write_records(args.json, [record])
    if record["failed"]:
        sys.exit(f"{len(record['failed'])} requests failed")


if __name__ == "__main__":
    main()
