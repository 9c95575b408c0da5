"""Demonstrate the platform: three nodes on one machine, two models, every kind of start, and the bill.

All files are in `.demo/`; --keep leaves the platform running.

example:
  python -m benchmarks.demo --keep
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.harness.admin_client import until
from benchmarks.harness.arguments import make_parser
from benchmarks.harness.local_platform import PlatformStateError, RunningPlatform, run_cli
from benchmarks.harness.processes import ROOT, exit_on_sigterm, module
from benchmarks.harness.random_llama import write_random_llama

FOLDER = ROOT / ".demo"
DATA = FOLDER / "data"
TINY, BIG = "tiny-coder", "random-256mb"
PROMPT = "def read_lines(path):\n    "
SAMPLE_TOKENS = 120
CALLS_AT_ONCE = 20


class DemoFailed(Exception):
    """A step of the demo did not produce the expected result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """One measured call."""

    model: str
    what: str
    start_kind: str
    node: str
    ttft_s: float
    tokens_per_s: float
    text: str


def say(text: str) -> None:
    print(text, flush=True)


def hypercast(*arguments: str, quiet: bool = False) -> str:
    """Run the command line as a user would, with its notes on this terminal."""
    if not quiet:
        say(f"\n$ hypercast {' '.join(arguments)}")
    done = subprocess.run(
        module("cli", *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DemoFailed(f"hypercast {' '.join(arguments)} ended with {done.returncode}")
    return done.stdout


def list_rows(*arguments: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(hypercast(*arguments, "-o", "json", quiet=True))
    return rows


async def call(
    client: AsyncOpenAI,
    model: str,
    what: str,
    *,
    tokens: int = 16,
    prompt: str = PROMPT,
    temperature: float = 0.0,
) -> TimedCall:
    """Stream one completion, timed at the client."""
    began = time.perf_counter()
    first = 0.0
    count = 0
    pieces: list[str] = []
    facts: dict[str, str] = {}
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=temperature,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and not first:
            first = time.perf_counter()
        pieces += [choice.text for choice in chunk.choices]
        if chunk.usage:
            count = chunk.usage.completion_tokens
            facts = chunk.hypercast  # type: ignore[attr-defined]
    ended = time.perf_counter()
    if count != tokens:
        raise DemoFailed(f"{model}: requested {tokens} tokens, received {count}")
    return TimedCall(
        model=model,
        what=what,
        start_kind=facts["x_start_kind"],
        node=facts["node"],
        ttft_s=first - began,
        tokens_per_s=(count - 1) / max(1e-9, ended - first),
        text="".join(pieces),
    )


def running(model: str) -> list[dict[str, object]]:
    """Return the instances of a model with their nodes."""
    return [
        {**instance, "node": node["id"], "pid": node["pid"]}
        for node in list_rows("nodes")
        for instance in node["instances"]  # type: ignore[attr-defined]
        if instance["function"] == model
    ]


def holders(model: str) -> set[str]:
    return {
        str(node["id"])
        for node in list_rows("nodes")
        if f"{model}:1" in node["tiers"]["host"]  # type: ignore[index]
    }


async def starts(client: AsyncOpenAI, model: str) -> list[TimedCall]:
    """Make the same call from every tier."""
    calls = []
    have = await asyncio.to_thread(holders, model)
    elsewhere = next(f"node-{index}" for index in range(3) if f"node-{index}" not in have)
    say(f"\n$ hypercast scale {model} --instances 1 --on {elsewhere} --no-wait")
    # The command's request without its process: the load ends sooner than the command starts.
    scale = {"instances": 1, "on": [elsewhere], "wait": False}
    await client.post(
        str(client.base_url.join(f"/admin/functions/{model}/scale")), body=scale, cast_to=object
    )
    calls.append(await call(client, model, "first call, on a node without it"))
    calls.append(await call(client, model, "again"))
    await asyncio.to_thread(hypercast, "scale", model, "--instances", "0")

    async def stopped() -> bool:
        return not await asyncio.to_thread(running, model)

    await until(f"{model} has no instances", stopped, 30.0)
    calls.append(await call(client, model, "after its instance was evicted"))
    victim = (await asyncio.to_thread(running, model))[0]
    say(f"\n$ kill -9 {victim['pid']}   # {victim['node']}, which serves {model}")
    os.kill(int(str(victim["pid"])), 9)
    calls.append(await call(client, model, f"after {victim['node']} was killed"))
    if calls[-1].node == victim["node"]:
        raise DemoFailed(f"{model} was served by {victim['node']} again")
    return calls


async def session(url: str, key: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120.0)
    async with client:
        calls = []
        for model in (BIG, TINY):
            calls += await starts(client, model)
        began = time.perf_counter()
        many = await asyncio.gather(
            *(
                call(client, TINY, "at once", tokens=32, prompt=f"def step_{index}(", temperature=0.8)
                for index in range(CALLS_AT_ONCE)
            )
        )
        took = time.perf_counter() - began
        sample = await call(client, TINY, "sampled", tokens=SAMPLE_TOKENS, temperature=0.6)
    say("\nStarts, timed at the client:")
    show(calls)
    check_order([timed for timed in calls if timed.model == BIG])
    tokens = 32 * CALLS_AT_ONCE
    slowest = max(timed.ttft_s for timed in many)
    say(
        f"{CALLS_AT_ONCE} streams at once: {tokens} tokens in {took:.2f} s ({tokens / took:.0f} tokens/s), "
        f"on {len({timed.node for timed in many})} node(s), slowest TTFT {slowest:.2f} s\n"
    )
    say("tiny-coder generates (temperature 0.6):")
    say("    " + (PROMPT + sample.text).replace("\n", "\n    ") + "\n")


def show(calls: Sequence[TimedCall]) -> None:
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("model", "call", "start kind", "node"):
        grid.add_column(heading)
    for heading in ("TTFT s", "tokens/s"):
        grid.add_column(heading, justify="right")
    for one in calls:
        facts = (one.model, one.what, one.start_kind, one.node)
        grid.add_row(*facts, f"{one.ttft_s:.3f}", f"{one.tokens_per_s:.1f}")
    Console(width=110, highlight=False).print(grid)


def check_order(calls: Sequence[TimedCall]) -> None:
    """Verify that the large model's starts have the expected kinds and order of cost."""
    cold, hot, warm = calls[:3]
    kinds = [timed.start_kind for timed in (cold, warm, hot)]
    if kinds != ["cold", "warm", "hot"]:
        raise DemoFailed(f"expected starts cold, warm and hot, got {kinds}")
    if not cold.ttft_s > warm.ttft_s > hot.ttft_s:
        raise DemoFailed("expected TTFT cold > warm > hot")


def main() -> None:
    exit_on_sigterm()
    parser = make_parser("benchmarks.demo", __doc__)
    parser.add_argument("--keep", action="store_true", help="leave the platform running at the end")
    options = parser.parse_args()
    began = time.perf_counter()
    run_cli("down", "--data-dir", str(DATA))  # of an earlier run
    shutil.rmtree(DATA, ignore_errors=True)
    checkpoint = FOLDER / BIG
    write_random_llama(checkpoint, ROOT / "functions" / TINY / "model")
    try:
        # Without images in idle GPU memory, so that a start from host memory is seen too.
        nodes = ("--nodes", "3", "--hosts", "3", "--keep-hot", "0s")
        hypercast("up", *nodes, "--port", "0", "--detach", "--data-dir", str(DATA))
        running_platform = RunningPlatform.of(DATA)
        url, key = running_platform.urls[0], running_platform.admin_key
        os.environ |= {"HYPERCAST_URL": url, "HYPERCAST_API_KEY": key}
        say(f"(up after {time.perf_counter() - began:.1f} s)")
        say(hypercast("deploy", str(ROOT / "functions" / TINY), "--keep-alive", "5m"))
        say(hypercast("deploy", str(checkpoint), "--name", BIG, "--keep-alive", "5m"))
        asyncio.run(session(url, key))
        say(hypercast("usage", "report"))
    except (DemoFailed, PlatformStateError) as failure:
        sys.exit(f"demo failed: {failure}\nlogs are in {DATA / 'logs'}")
    finally:
        if not options.keep:
            hypercast("down", "--data-dir", str(DATA), quiet=True)
    say(f"\nThe demo took {time.perf_counter() - began:.1f} s.")


if __name__ == "__main__":
    main()
