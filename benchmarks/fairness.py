"""Measure what a flooding tenant costs another tenant: the time to first token with and without the flood.

Starts a platform (or uses --url and --key) with an instance of each model on every node. A quiet tenant
streams one completion after another, in turns alone and while another tenant keeps many connections busy with
long prompts and outputs. Reported are the quiet tenant's times to first token (not to its first text: a token
may be part of a character) in both cases, and the flood's throughput. Both tenants retry what is refused. The
flood runs in a process of its own, so that its client does not slow the measuring one.

example:
  python -m benchmarks.fairness --rounds 3 --connections 64 --json fairness.json
  python -m benchmarks.fairness --nodes 3 --device emulated:h800/1000/2 --models emulated:llama2-13b/1000
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.harness.admin_client import AdminClient
from benchmarks.harness.arguments import at_least, benchmark_parser
from benchmarks.harness.crew import running_children
from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello
from benchmarks.harness.local_platform import PLATFORM_FAILURES, LocalPlatform, running_platform
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_llama import write_random_llama
from benchmarks.harness.records import chosen, describe_run, recording, timed

TINY = "tiny-coder"
TINY_FOLDER = ROOT / "functions" / TINY
VOCABULARY = 2048
ANSWER_TOKENS = 16  # per completion of the quiet tenant
PAUSE_S = 0.05  # maximum pause between two completions
FIRST_STREAMS = 8  # streams with a token before the flood counts as started
SETTLING = 2  # warm-up requests of each case
QUIET_WITHIN_S = 60.0  # after the flood's end
RETRY_S = 0.05  # after a refusal


class RequestFailed(Exception):
    """The platform answered a request with an error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


class TenantLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one tenant."""

    url: str
    key: str
    model: str
    prompt_tokens: int
    output_tokens: int

    def body(self, rng: random.Random) -> bytes:
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(self.prompt_tokens)]
        request = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,  # one chunk per token, even for half a character
            "stream": True,
        }
        return json.dumps(request).encode()


class StopFlood(CrewMessage, frozen=True, kw_only=True):
    """End the flood; answered by FloodResult."""


class FloodResult(CrewMessage, frozen=True, kw_only=True):
    """The throughput of the flood in a round."""

    seconds: float
    answers: int
    chunks: int
    refused: int


PROTOCOL = CrewProtocol.of(StopFlood, FloodResult)


@dataclass(slots=True)
class FirstTokenTimes:
    """The quiet tenant's times to first token over all rounds, retries after refusals included."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0


def p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1]


# A minimal client, which leaves the processor to the platform.


class KeepAliveConnection:
    """One kept-alive HTTP/1.1 connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, key: str, body: bytes) -> AsyncIterator[bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        status = int(lines[0].split()[1])
        if status != 200:
            length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
            raise RequestFailed(status, (await reader.readexactly(length)).decode())
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            for event in chunk.split(b"\n\n"):
                if event.startswith(b"data: "):
                    yield event
        await reader.readline()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def quiet_round(load: TenantLoad, requests: int, rng: random.Random, side: FirstTokenTimes) -> None:
    """Send completions one after another, and time each after the warm-up to its first token."""
    connection = KeepAliveConnection(load.url)
    for number in range(SETTLING + requests):
        body = load.body(rng)
        started_s, first_s = time.perf_counter(), None
        while first_s is None:
            try:
                async for event in connection.post("/v1/completions", load.key, body):
                    if first_s is None and b'"choices"' in event:
                        first_s = time.perf_counter() - started_s
                assert first_s is not None, "a completion without a token"
            except RequestFailed:
                side.refused += 1
                await asyncio.sleep(RETRY_S)
        if number >= SETTLING:
            side.seconds.append(first_s)
        await asyncio.sleep(rng.uniform(0, PAUSE_S))
    connection.close()


# The flood, in its own process.


async def flood(path: str, rank: int, connections: int, load: TenantLoad) -> None:
    """Keep all connections busy, from the hello on, until the benchmark stops the flood."""
    done: Counter[str] = Counter()
    started_event = asyncio.Event()
    started: set[int] = set()

    async def one(number: int) -> None:
        rng, connection = random.Random(number), KeepAliveConnection(load.url)
        try:
            while True:
                try:
                    async for event in connection.post("/v1/completions", load.key, load.body(rng)):
                        done["chunks"] += b'"choices"' in event
                        started.add(number)
                        if len(started) >= min(connections, FIRST_STREAMS):
                            started_event.set()
                    done["answers"] += 1
                except RequestFailed:
                    done["refused"] += 1
                    await asyncio.sleep(RETRY_S)
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(connections)]
        await started_event.wait()
        before, started_s = done.copy(), time.perf_counter()

        async def stop(order: StopFlood) -> FloodResult:
            seconds = time.perf_counter() - started_s
            for task in tasks:
                task.cancel()
            counts = {name: done[name] - before[name] for name in ("answers", "chunks", "refused")}
            return FloodResult(seconds=seconds, **counts)

        await serve_async(path, MemberHello(rank=rank), PROTOCOL, stop)
        for task in tasks:
            task.cancel()


@contextmanager
def flooding(load: TenantLoad, connections: int, into: list[FloodResult]) -> Iterator[None]:
    """Run a flood, which has started when the block begins."""
    arguments = (connections, msgspec.json.encode(load).decode())
    with running_children("benchmarks.fairness", PROTOCOL, ("--flood", *arguments)) as crew:
        yield
        into += crew.ask(StopFlood(), FloodResult, QUIET_WITHIN_S)


# The platform.


@contextmanager
def platform_with_models(folder: Path, args: argparse.Namespace) -> Iterator[LocalPlatform]:
    """Run a platform with an instance of each model on every node."""
    with running_platform(folder / "data", "--device", args.device, nodes=args.nodes) as platform:
        sources = {TINY: TINY_FOLDER, "random": folder / "random"}
        write_random_llama(sources["random"], TINY_FOLDER / "model", args.layers)
        for model in args.models.split(","):
            source, instances = str(sources.get(model, model)), str(args.nodes)
            platform.command("deploy", source, "--name", name_of(model), "--min-instances", instances)
        yield platform


def name_of(model: str) -> str:
    """Return the name of a model's function."""
    return model.rpartition(":")[2].partition("/")[0]


async def measure(
    url: str, admin: AdminClient, model: str, args: argparse.Namespace
) -> tuple[FirstTokenTimes, FirstTokenTimes, list[FloodResult]]:
    quiet = TenantLoad(
        url=url,
        key=await admin.create_key("quiet", "fairness"),
        model=model,
        prompt_tokens=args.prompt,
        output_tokens=ANSWER_TOKENS,
    )
    loud = TenantLoad(
        url=url,
        key=await admin.create_key("loud", "fairness"),
        model=model,
        prompt_tokens=args.flood_prompt,
        output_tokens=args.flood_output,
    )
    rng = random.Random(1)
    alone, flooded, floods = FirstTokenTimes(), FirstTokenTimes(), list[FloodResult]()
    for _ in range(args.rounds):
        await admin.wait_until_idle(QUIET_WITHIN_S)
        await quiet_round(quiet, args.requests, rng, alone)
        with flooding(loud, args.connections, floods):
            await quiet_round(quiet, args.requests, rng, flooded)
    return alone, flooded, floods


async def measure_model(
    url: str, key: str, model: str, args: argparse.Namespace
) -> tuple[FirstTokenTimes, FirstTokenTimes, list[FloodResult]]:
    """Measure one model with connections of its own."""
    async with AdminClient.connect(url, key) as admin:
        return await measure(url, admin, model, args)


# Records.


def records(
    model: str,
    alone: FirstTokenTimes,
    flooded: FirstTokenTimes,
    floods: Sequence[FloodResult],
    common: dict[str, object],
) -> list[dict[str, Any]]:
    params = {**common, "model": model}
    alone_row, row = (
        timed(name, params, side.seconds, p95_s=p95(side.seconds), refused=side.refused)
        for name, side in (("alone", alone), ("flooded", flooded))
    )
    took_s = sum(flood.seconds for flood in floods)
    row |= {
        "limit_s": 2 * alone_row["p95_s"],
        "ratio_to_limit": row["p95_s"] / (2 * alone_row["p95_s"]),
        "p50_ratio": row["median_s"] / alone_row["median_s"],
        "p95_ratio": row["p95_s"] / alone_row["p95_s"],
        "flood_answers": sum(flood.answers for flood in floods),
        "flood_refused": sum(flood.refused for flood in floods),
        "flood_tokens_per_s": sum(flood.chunks for flood in floods) / took_s,
    }
    return [alone_row, row]


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    line = (
        f"{row['params']['model']:10} {row['name']:8} first token"
        f" P50 {row['median_s'] * 1e3:7.1f} ms  P95 {row['p95_s'] * 1e3:7.1f} ms"
    )
    if "p95_ratio" in row:
        line += (
            f"  x {row['p50_ratio']:.2f}  x {row['p95_ratio']:.2f}"
            f"  refused {row['refused']}  flood {row['flood_tokens_per_s']:.0f} tokens/s"
        )
    return line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.fairness", __doc__)
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=5, help="rounds with and without the flood, in turns")
    add("--requests", type=int, default=20, help="requests of the quiet tenant per round")
    add("--prompt", type=int, default=128, help="prompt tokens of the quiet tenant")
    add("--connections", type=int, default=64, help="connections of the flood")
    add("--flood-prompt", type=int, default=512, help="prompt tokens of the flood")
    add("--flood-output", type=int, default=128, help="output tokens of the flood")
    add("--models", default=f"random,{TINY}", help="comma-separated models")
    add("--layers", type=int, default=4, help="layers of the random model, about 13M parameters each")
    add("--nodes", type=at_least(1), default=1, help="nodes")
    add("--device", default="cpu", help="accelerator of the nodes")
    add("--url", help="use this running platform, which must serve the models")
    add("--key", help="an admin key of --url")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    names = ("rounds", "requests", "prompt", "connections", "flood_prompt", "flood_output", "layers")
    common = chosen(args, *names, "nodes", "device") | describe_run("benchmarks.fairness")
    with ExitStack() as stack:
        out = stack.enter_context(
            recording("fairness", json=args.json, show=show, failures=PLATFORM_FAILURES)
        )
        url, key = args.url, args.key or ""
        if not url:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hypercast-fairness-"))
            platform = stack.enter_context(platform_with_models(Path(folder), args))
            url, key = platform.url, platform.admin_key
        for model in args.models.split(","):
            out.add(*records(model, *asyncio.run(measure_model(url, key, name_of(model), args)), common))


if __name__ == "__main__":
    if sys.argv[3:4] == ["--flood"]:
        path, rank, _, connections, load = sys.argv[1:]
        uvloop.run(flood(path, int(rank), int(connections), msgspec.json.decode(load, type=TenantLoad)))
    else:
        main()
