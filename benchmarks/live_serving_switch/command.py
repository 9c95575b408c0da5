"""Measure what a switch costs a stream, and how soon a node serves by itself after its last block.

Starts a platform of its own (two nodes that hold a random fp32 model, two that load it over slow links). In
each load one stream is served by the pipeline of the loading nodes and moves to the first of them that is
ready: the longest gap between two of its tokens is compared with the time to recompute those tokens' keys and
values on that node. `after_last_block_ms` is the time from each node's last verified block until it was
ready. All figures are the machine's own time: run it on an idle one.

example:
  python -m benchmarks.live_serving_switch --repeat 5 --json switch.json
"""

import asyncio
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.harness.admin_client import PATIENCE_S, AdminClient, http_client
from benchmarks.harness.arguments import at_least, benchmark_parser, say
from benchmarks.harness.local_platform import PLATFORM_FAILURES, LocalPlatform, PlatformStateError
from benchmarks.harness.records import all_but, describe_run, recording, timed
from benchmarks.live_serving.arguments import add_platform
from benchmarks.live_serving.client import LiveAnswer, LiveClient, LiveRequest, draw_prompt
from benchmarks.live_serving.models import CONTEXT, FAMILIES, write_model
from benchmarks.live_serving.platform import slow_link_platform

FUNCTION = "switching"
_SOURCES, _LOADING = 2, 2
_RECOMPUTES = 5
_MIN_TAIL = 30  # tokens that must follow a switch for it to count
_GAP_LIMIT, _READY_LIMIT_MS = 2.0, 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSwitch:
    """The switch of one stream, at which `context` tokens were known."""

    context: int
    gap_ms: float
    usual_gap_ms: float
    recompute_ms: float
    after_last_block_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.gap_ms / self.recompute_ms


async def measure(
    admin: AdminClient, client: LiveClient, names: Sequence[str], work: LiveRequest
) -> StreamSwitch | None:
    """Run one load; return None if the stream did not move from a pipeline to a node.

    Raises PlatformStateError.
    """
    sources, cold = names[:_SOURCES], names[_SOURCES:]
    await admin.place_image(FUNCTION, sources)
    moves = await admin.counter("hypercast_live_moves_total")
    await admin.scale(FUNCTION, _LOADING, cold, wait=False)
    asking = asyncio.create_task(client.ask(FUNCTION, work))

    try:
        await admin.wait_until_ready(FUNCTION, cold, PATIENCE_S)
        answer = await asking
    finally:
        asking.cancel()
    moved = await admin.counter("hypercast_live_moves_total") - moves
    if answer.failure or answer.start_kind != "live" or moved != 1:
        say(f"no switch: {answer} {answer.failure}, {moved:g} moves")
        return None
    instances = (await admin.function(FUNCTION))["instances"]
    complete_at = await admin.last_cast(FUNCTION, [one["node"] for one in instances])
    after_ms = tuple(sorted((one["since"] - complete_at[one["node"]]) * 1e3 for one in instances))
    at, gap_s = longest_gap(answer)
    known = (*work.prompt, *answer.ids[:at])
    return StreamSwitch(
        context=len(known),
        gap_ms=gap_s * 1e3,
        usual_gap_ms=statistics.median(b - a for a, b in pairwise(answer.arrived_s)) * 1e3,
        recompute_ms=await recompute_s(client, known) * 1e3,
        after_last_block_ms=after_ms,
    )


def longest_gap(answer: LiveAnswer) -> tuple[int, float]:
    """Return the tokens before the longest gap, and its seconds."""
    gaps = [(b - a, at) for at, (a, b) in enumerate(pairwise(answer.arrived_s), 1)]
    seconds, at = max(gaps)
    return at, seconds


async def recompute_s(client: LiveClient, known: Sequence[int]) -> float:
    """Return the time to first token of a prompt of these tokens, on an idle node."""
    seconds = []
    for _ in range(_RECOMPUTES):
        answer = await client.ask(FUNCTION, LiveRequest(prompt=tuple(known), tokens=1, seed=None))
        if answer.failure:
            raise PlatformStateError(f"{answer}: {answer.failure}")
        seconds.append(answer.arrived_s[0] - answer.sent_s)
    return statistics.median(seconds)


async def run(platform: LocalPlatform, args: Namespace, model: Path) -> list[StreamSwitch]:
    chance = random.Random(args.seed)
    limits = ("--max-instances", str(_LOADING), "--target-concurrency", "32", "--keep-alive", "10m")
    arguments = ("--name", FUNCTION, "--dtype", "float32", "--live", "pipeline", *limits)
    await asyncio.to_thread(platform.command, "deploy", str(model), *arguments)
    async with http_client(platform.url, platform.admin_key) as http:
        admin, client = AdminClient(http), LiveClient(http)
        found: list[StreamSwitch] = []
        prompt_tokens = args.prompt
        for turn in range(3 * args.repeat):
            work = LiveRequest(
                prompt=draw_prompt(chance, prompt_tokens), tokens=CONTEXT - prompt_tokens - 1, seed=None
            )
            switch = await measure(
                admin, client, [node_component.name for node_component in platform.nodes], work
            )
            if switch is None:
                continue
            say(f"load {turn}: {switch}")
            made = switch.context - prompt_tokens
            prompt_tokens = min(max(64, args.context - made), CONTEXT // 2)  # approach --context
            if made + prompt_tokens + _MIN_TAIL < CONTEXT:
                found.append(switch)
            if len(found) == args.repeat:
                break
        return found


def record_of(found: Sequence[StreamSwitch], params: dict[str, object]) -> dict[str, Any]:
    after = [ms for one in found for ms in one.after_last_block_ms]
    ratio = statistics.median(one.ratio for one in found)
    return {
        **timed("mode-switch", params, [one.gap_ms / 1e3 for one in found]),
        "switches": [{**asdict(one), "ratio": round(one.ratio, 3)} for one in found],
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
    parser = benchmark_parser("benchmarks.live_serving_switch", __doc__)
    add = parser.add_argument
    add("--family", choices=tuple(FAMILIES), default="llama", help="model family")
    add("--context", type=at_least(128), default=1000, help="approximate tokens at the switch")
    add("--prompt", type=at_least(2), default=600, help="prompt tokens of the first stream")
    add("--repeat", type=at_least(1), default=5, help="switches")
    moves = ("auto", "always", "never")
    add("--kv-moves", choices=moves, default="auto", help="transfer K and V; auto: where that is cheaper")
    add_platform(parser, width=256, link_rate="20mbit")
    return parser.parse_args()


def main() -> None:
    args = parse()
    params: dict[str, object] = {**all_but(args), **describe_run("benchmarks.live_serving_switch")}
    started_s = time.monotonic()
    with recording("live_serving_switch", json=args.json, show=show, failures=PLATFORM_FAILURES) as out:
        with (
            TemporaryDirectory(prefix="hypercast-live-models-") as folder,
            slow_link_platform(args, _SOURCES + _LOADING, "--kv-moves", args.kv_moves) as platform,
        ):
            params["model_bytes"] = write_model(args.family, args.width, Path(folder) / "model")
            found = uvloop.run(run(platform, args, Path(folder) / "model"))
        if not found:
            raise PlatformStateError("no stream moved to another node: try a slower --link-rate")
        params["seconds"] = round(time.monotonic() - started_s, 1)
        out.add(record_of(found, params))


if __name__ == "__main__":
    main()
