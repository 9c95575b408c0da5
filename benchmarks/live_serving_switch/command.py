"""What a switch costs a stream, and how soon a node serves alone after its last block.

Starts a platform of its own (two nodes that hold a random fp32 model, two that load it over slow links).
In each load one stream is served by the pipeline of the loading nodes and goes on at the first of them that
is ready: the longest time between two of its tokens from then on is compared with what computing the same
tokens' keys and values takes on that node. `after_last_block_ms` is the time from when each node had its last
block, checked, until it was ready. All that counts is the machine's own time: run it on a quiet one.

  python -m benchmarks.live_serving_switch --repeat 5 --json FILE
"""

import asyncio
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import SubprocessError
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import uvloop

from benchmarks.arguments import at_least, parser_of, say
from benchmarks.chaos_cluster import Cluster
from benchmarks.endings import end_politely
from benchmarks.live_serving_arguments import add_platform
from benchmarks.live_serving_client import Answer, Caller, Work, draw_prompt
from benchmarks.live_serving_cluster import NotThere, Stage, platform, until
from benchmarks.live_serving_models import CONTEXT, FAMILIES, write_model
from benchmarks.machine import describe_machine, tell_records

FUNCTION = "switching"
_SOURCES, _LOADING = 2, 2
_RECOMPUTES = 5
_TAIL = 30  # tokens that a stream still has to make at its switch, or there was none to speak of
_GAP_LIMIT, _READY_LIMIT_MS = 2.0, 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One stream's: `context` tokens were known when it went on elsewhere."""

    context: int
    gap_ms: float
    usual_gap_ms: float
    recompute_ms: float
    after_last_block_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.gap_ms / self.recompute_ms


async def measure(stage: Stage, caller: Caller, names: Sequence[str], work: Work) -> Switch | None:
    """One load; None if the stream did not go from a pipeline to a node. Raises NotThere."""
    sources, cold = names[:_SOURCES], names[_SOURCES:]
    await stage.held_by(FUNCTION, sources)
    moves = await stage.counter("hypercast_live_moves_total")
    await stage.scale(FUNCTION, _LOADING, cold, wait=False)
    asking = asyncio.create_task(caller.ask(FUNCTION, work))

    async def ready() -> bool:
        states = await stage.states(FUNCTION)
        return all(states.get(node) == "ready" for node in cold)

    try:
        await until(f"{', '.join(cold)} are ready", ready)
        answer = await asking
    finally:
        asking.cancel()
    moved = await stage.counter("hypercast_live_moves_total") - moves
    if answer.failure or answer.start_kind != "live" or moved != 1:
        say(f"no switch: {answer} {answer.failure}, {moved:g} moves")
        return None
    instances = (await stage.function(FUNCTION))["instances"]
    came = await stage.last_cast(FUNCTION, [one["node"] for one in instances])
    after_ms = tuple(sorted((one["since"] - came[one["node"]]) * 1e3 for one in instances))
    at, gap_s = longest_gap(answer)
    known = (*work.prompt, *answer.ids[:at])
    return Switch(
        context=len(known),
        gap_ms=gap_s * 1e3,
        usual_gap_ms=statistics.median(b - a for a, b in pairwise(answer.arrived_s)) * 1e3,
        recompute_ms=await recompute_s(caller, known) * 1e3,
        after_last_block_ms=after_ms,
    )


def longest_gap(answer: Answer) -> tuple[int, float]:
    """How many tokens had come when the longest pause began, and its seconds."""
    gaps = [(b - a, at) for at, (a, b) in enumerate(pairwise(answer.arrived_s), 1)]
    seconds, at = max(gaps)
    return at, seconds


async def recompute_s(caller: Caller, known: Sequence[int]) -> float:
    """To the first token of a prompt of these, on a node that serves alone and has nothing else to do."""
    took = []
    for _ in range(_RECOMPUTES):
        answer = await caller.ask(FUNCTION, Work(prompt=tuple(known), tokens=1, seed=None))
        if answer.failure:
            raise NotThere(f"{answer}: {answer.failure}")
        took.append(answer.arrived_s[0] - answer.sent_s)
    return statistics.median(took)


async def run(cluster: Cluster, args: Namespace, model: Path) -> list[Switch]:
    chance = random.Random(args.seed)
    limits = ("--max-instances", str(_LOADING), "--target-concurrency", "32", "--keep-alive", "10m")
    arguments = ("--name", FUNCTION, "--dtype", "float32", "--live", "pipeline", *limits)
    await asyncio.to_thread(cluster.command, "deploy", str(model), *arguments)
    headers = {"authorization": f"Bearer {cluster.admin_key}"}
    async with httpx2.AsyncClient(
        base_url=cluster.urls[0], headers=headers, timeout=120.0, trust_env=False
    ) as http:
        stage, caller = Stage(http), Caller(http)
        found: list[Switch] = []
        prompt_tokens = args.prompt
        for turn in range(3 * args.repeat):
            work = Work(
                prompt=draw_prompt(chance, prompt_tokens), tokens=CONTEXT - prompt_tokens - 1, seed=None
            )
            switch = await measure(stage, caller, [part.name for part in cluster.nodes], work)
            if switch is None:
                continue
            say(f"load {turn}: {switch}")
            made = switch.context - prompt_tokens
            prompt_tokens = min(max(64, args.context - made), CONTEXT // 2)  # the next one comes nearer
            if made + prompt_tokens + _TAIL < CONTEXT:
                found.append(switch)
            if len(found) == args.repeat:
                break
        return found


def record_of(found: Sequence[Switch], params: dict[str, object]) -> dict[str, Any]:
    after = [ms for one in found for ms in one.after_last_block_ms]
    ratio = statistics.median(one.ratio for one in found)
    return {
        "name": "mode-switch",
        "params": params,
        "switches": [{**asdict(one), "ratio": round(one.ratio, 3)} for one in found],
        "seconds": [one.gap_ms / 1e3 for one in found],
        "median_s": statistics.median(one.gap_ms for one in found) / 1e3,
        "limit_s": _GAP_LIMIT * statistics.median(one.recompute_ms for one in found) / 1e3,
        "median_ratio": round(ratio, 3),
        "worst_ratio": round(max(one.ratio for one in found), 3),
        "after_last_block_ms": {"median": round(statistics.median(after), 1), "worst": round(max(after), 1)},
        "late": sum(ms > _READY_LIMIT_MS for ms in after),
        "holds": max(one.ratio for one in found) <= _GAP_LIMIT and max(after) <= _READY_LIMIT_MS,
    }


def show(record: dict[str, Any]) -> str:
    after = record["after_last_block_ms"]
    return (
        f"longest gap {record['median_s'] * 1e3:.1f} ms at a switch, {record['median_ratio']:.2f} x the "
        f"recompute (worst {record['worst_ratio']:.2f}); ready {after['median']:.1f} ms after the last block "
        f"(worst {after['worst']:.1f})"
    )


def parse() -> Namespace:
    parser = parser_of("benchmarks.live_serving_switch", __doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the record to this file")
    add("--family", choices=tuple(FAMILIES), default="llama")
    add("--context", type=at_least(128), default=1000, help="tokens at the switch, about (default 1000)")
    add("--prompt", type=at_least(2), default=600, help="tokens of the first stream's prompt (default 600)")
    add("--repeat", type=at_least(1), default=5, help="switches (default 5)")
    add(
        "--kv-moves",
        choices=("auto", "always", "never"),
        default="auto",
        help="fetch K and V at a switch: auto, where that is cheaper than to compute them (default)",
    )
    add_platform(parser, width=256, link_rate="20mbit")
    return parser.parse_args()


def main() -> None:
    end_politely()
    args = parse()
    given = {name: value for name, value in vars(args).items() if name not in ("json", "data_dir")}
    params: dict[str, object] = {**given, **describe_machine("benchmarks.live_serving_switch")}
    began_s = time.monotonic()
    try:
        with (
            TemporaryDirectory(prefix="hypercast-live-models-") as folder,
            platform(args, _SOURCES + _LOADING, "--kv-moves", args.kv_moves) as cluster,
        ):
            params["model_bytes"] = write_model(args.family, args.width, Path(folder) / "model")
            found = uvloop.run(run(cluster, args, Path(folder) / "model"))
    except (NotThere, RuntimeError, OSError, SubprocessError, httpx2.HTTPError, ExceptionGroup) as error:
        sys.exit(f"live_serving_switch: {error!r}")
    except KeyboardInterrupt:
        sys.exit(130)
    if not found:
        sys.exit("live_serving_switch: no stream went on elsewhere")
    params["seconds"] = round(time.monotonic() - began_s, 1)
    tell_records([record_of(found, params)], show, args.json)


if __name__ == "__main__":
    main()
