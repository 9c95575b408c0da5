"""What a tenant that floods the platform costs another one: the time to first token of both sides.

`python -m benchmarks.fairness --json FILE` starts a platform of one node (or uses `--url` and `--key`)
with two models. A quiet tenant streams one completion after another, in turns alone and while another
tenant keeps many connections busy with long prompts and long answers, as fast as it is served. Told are
the quiet tenant's times to first token (not to its first text: a token may be a part of a character) on
both sides and how much the flood got done meanwhile. The flood is a process of its own, so that its client
does not slow the measuring one.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.arguments import at_least, parser_of
from benchmarks.endings import end_politely
from benchmarks.machine import ROOT, describe_machine, write_records
from benchmarks.random_llama import write_random_llama

TINY = "tiny-coder"
TINY_FOLDER = ROOT / "functions" / TINY
VOCABULARY = 2048
ANSWER_TOKENS = 16  # of the quiet tenant's completions
PAUSE_S = 0.05  # at most, between two of them
FIRST_STREAMS = 8  # of the flood that have a token, before it counts as being there
SETTLING = 2  # requests before a side counts
QUIET_WITHIN_S = 60.0  # after the flood's end


class Refused(Exception):
    """The platform answered a request with an error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One tenant's requests."""

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
            "return_token_ids": True,  # so that a chunk comes with each token, though it be half a character
            "stream": True,
        }
        return json.dumps(request).encode()


@dataclass(slots=True)
class Flooded:
    """What the flood got done in a round."""

    seconds: float = 0.0
    answers: int = 0
    chunks: int = 0
    refused: int = 0


@dataclass(slots=True)
class Side:
    """The quiet tenant's times to first token, round by round."""

    seconds: list[float] = field(default_factory=list)

    @property
    def p50_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95_s(self) -> float:
        return statistics.quantiles(self.seconds, n=20, method="inclusive")[-1]


# A client that does little, so that the platform has the processor.


class Wire:
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
            raise Refused(status, (await reader.readexactly(length)).decode())
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


async def quiet_round(load: Load, requests: int, rng: random.Random, side: Side) -> None:
    """One completion after another, each but the first few timed to its first token."""
    wire = Wire(load.url)
    for number in range(SETTLING + requests):
        body = load.body(rng)
        began_s, first_s = time.perf_counter(), None
        async for event in wire.post("/v1/completions", load.key, body):
            if first_s is None and b'"choices"' in event:
                first_s = time.perf_counter() - began_s
        assert first_s is not None, "an answer without a token"
        if number >= SETTLING:
            side.seconds.append(first_s)
        await asyncio.sleep(rng.uniform(0, PAUSE_S))
    wire.close()


# The flood, in its own process.


def flood_process(load: Load, connections: int, pipe: Connection) -> None:
    uvloop.run(flood(load, connections, pipe))


async def flood(load: Load, connections: int, pipe: Connection) -> None:
    """Keep all connections busy until told to stop; says when it is under way, and then what it did."""
    done = Flooded()
    under_way = asyncio.Event()
    started: set[int] = set()

    async def one(number: int) -> None:
        rng, wire = random.Random(number), Wire(load.url)
        try:
            while True:
                try:
                    async for event in wire.post("/v1/completions", load.key, load.body(rng)):
                        done.chunks += b'"choices"' in event
                        started.add(number)
                        if len(started) >= min(connections, FIRST_STREAMS):
                            under_way.set()
                    done.answers += 1
                except Refused:
                    done.refused += 1
        finally:
            wire.close()

    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(connections)]
        await under_way.wait()
        before, began_s = (done.answers, done.chunks, done.refused), time.perf_counter()
        pipe.send("under way")
        await loop.run_in_executor(None, pipe.recv)
        seconds = time.perf_counter() - began_s
        counts = [
            now - then for now, then in zip((done.answers, done.chunks, done.refused), before, strict=True)
        ]
        for task in tasks:
            task.cancel()
    pipe.send(Flooded(seconds, *counts))


@contextmanager
def flooding(load: Load, connections: int, into: list[Flooded]) -> Iterator[None]:
    """A flood that is under way inside of the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=flood_process, args=(load, connections, theirs))
    process.start()
    try:
        ours.recv()
        yield
        ours.send("stop")
        into.append(ours.recv())
        process.join()
    finally:
        process.kill()
        process.join()


# The platform.


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    url: str
    key: str

    def ask(self, path: str, body: object | None = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self.key}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def wait_until_quiet(self) -> None:
        """Return once nothing is in flight: what a flood left behind is no part of the other side."""
        until_s = time.monotonic() + QUIET_WITHIN_S
        while self.ask("/health")["in_flight"]:
            assert time.monotonic() < until_s, "requests are in flight long after the flood"
            time.sleep(0.1)

    def key_of(self, tenant: str) -> str:
        key: str = self.ask("/admin/keys", {"tenant": tenant, "name": "fairness"})["key"]
        return key


def hypercast(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cli", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def platform_of_one_node(folder: Path, layers: int) -> Iterator[Platform]:
    """A platform with both models deployed, gone after the block."""
    data = folder / "data"
    hypercast("up", "--detach", "--nodes", "1", "--port", "0", "--data-dir", str(data), "--device", "cpu")
    try:
        url = json.loads((data / "up.json").read_text())["url"]
        platform = Platform(url=url, key=(data / "admin.key").read_text().strip())
        checkpoint = folder / "random"
        write_random_llama(checkpoint, TINY_FOLDER / "model", layers)
        access = ("--url", url, "--api-key", platform.key)
        for name, path in ((TINY, TINY_FOLDER), ("random", checkpoint)):
            hypercast("deploy", str(path), "--name", name, "--min-instances", "1", *access)
        yield platform
    finally:
        hypercast("down", "--data-dir", str(data))


def measure(platform: Platform, model: str, args: argparse.Namespace) -> tuple[Side, Side, list[Flooded]]:
    quiet = Load(
        url=platform.url,
        key=platform.key_of("quiet"),
        model=model,
        prompt_tokens=args.prompt,
        output_tokens=ANSWER_TOKENS,
    )
    loud = Load(
        url=platform.url,
        key=platform.key_of("loud"),
        model=model,
        prompt_tokens=args.flood_prompt,
        output_tokens=args.flood_output,
    )
    rng = random.Random(1)
    alone, flooded, floods = Side(), Side(), list[Flooded]()
    for _ in range(args.rounds):
        platform.wait_until_quiet()
        asyncio.run(quiet_round(quiet, args.requests, rng, alone))
        with flooding(loud, args.connections, floods):
            asyncio.run(quiet_round(quiet, args.requests, rng, flooded))
    return alone, flooded, floods


# What is told.


def records(
    model: str, alone: Side, flooded: Side, floods: Sequence[Flooded], common: dict[str, object]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "params": {**common, "model": model},
            "seconds": side.seconds,
            "median_s": side.p50_s,
            "p95_s": side.p95_s,
        }
        for name, side in (("alone", alone), ("flooded", flooded))
    ]
    took_s = sum(flood.seconds for flood in floods)
    rows[1] |= {
        "limit_s": 2 * alone.p95_s,
        "ratio_to_limit": flooded.p95_s / (2 * alone.p95_s),
        "p50_ratio": flooded.p50_s / alone.p50_s,
        "p95_ratio": flooded.p95_s / alone.p95_s,
        "flood_answers": sum(flood.answers for flood in floods),
        "flood_refused": sum(flood.refused for flood in floods),
        "flood_tokens_per_s": sum(flood.chunks for flood in floods) / took_s,
    }
    return rows


def show(row: dict[str, Any]) -> str:
    """One line for people."""
    line = (
        f"{row['params']['model']:10} {row['name']:8} first token"
        f" P50 {row['median_s'] * 1e3:7.1f} ms  P95 {row['p95_s'] * 1e3:7.1f} ms"
    )
    if "p95_ratio" in row:
        line += (
            f"  x {row['p50_ratio']:.2f}  x {row['p95_ratio']:.2f}"
            f"  the flood got {row['flood_tokens_per_s']:.0f} tokens/s"
        )
    return line


def main() -> None:
    end_politely()
    parser = parser_of("benchmarks.fairness", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="on each side, in turns")
    parser.add_argument("--requests", type=int, default=20, help="of the quiet tenant in a round")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the quiet tenant's prompts")
    parser.add_argument("--connections", type=int, default=64, help="of the flood")
    parser.add_argument("--flood-prompt", type=int, default=512, help="tokens of its prompts")
    parser.add_argument("--flood-output", type=int, default=128, help="tokens of its answers")
    parser.add_argument("--models", default=f"random,{TINY}", help="which, separated by commas")
    parser.add_argument(
        "--layers", type=int, default=4, help="of the random model, about 13M parameters each"
    )
    parser.add_argument("--url", help="a platform that is up, with these models, instead of one of our own")
    parser.add_argument("--key", help="an admin key of it")
    args = parser.parse_args()
    common: dict[str, object] = {
        name: getattr(args, name)
        for name in ("rounds", "requests", "prompt", "connections", "flood_prompt", "flood_output", "layers")
    } | describe_machine("benchmarks.fairness")
    rows: list[dict[str, Any]] = []

    def run(platform: Platform) -> None:
        for model in args.models.split(","):
            for row in records(model, *measure(platform, model, args), common):
                print(show(row), flush=True)
                rows.append(row)

    if args.url:
        run(Platform(url=args.url, key=args.key or ""))
    else:
        with (
            tempfile.TemporaryDirectory(prefix="hypercast-fairness-") as folder,
            platform_of_one_node(Path(folder), args.layers) as platform,
        ):
            run(platform)
    if args.json:
        write_records(args.json, rows)


if __name__ == "__main__":
    main()
