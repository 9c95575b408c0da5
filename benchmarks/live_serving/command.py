"""Serve requests on nodes that are still loading, with stages killed at random tokens, and check every token.

Starts a platform of its own (a gateway, `--sources` + `--loading` nodes on hosts of their own, links so slow
that a load takes seconds) with small random fp32 models of three families. During each load --requests are in
flight, half greedy, half sampled with seeds; their tokens are compared with one node's. Long requests outlast
the load, so that they move as nodes become ready. With --kills, nodes of pipelines are killed with SIGKILL,
up to --per-load in each load, until the total is reached. At the end each request must be in the ledger once,
with the time of each member, and the meters must add up. It exits with 1 after any finding.

examples:
  python -m benchmarks.live_serving --json live.json     every family, k = 1, 2, 3, long and short requests
  python -m benchmarks.live_serving --kills 100 --json kills.json
"""

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.chaos.check import Findings
from benchmarks.harness.admin_client import http_client
from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, positive, say, some_of
from benchmarks.harness.local_platform import PLATFORM_FAILURES, LocalPlatform
from benchmarks.harness.records import all_but, describe_run, recording
from benchmarks.live_serving.arguments import add_load, add_platform
from benchmarks.live_serving.models import FAMILIES, write_model
from benchmarks.live_serving.platform import slow_link_platform
from benchmarks.live_serving.run import LiveServingRun, LoadRound, LoadScenario, check_ledger, show

SHORT = (8, 24)  # tokens of requests shorter than the load


def scenarios(args: Namespace, done: list[LoadRound], started_s: float) -> Iterator[LoadScenario]:
    """Yield the requested scenarios; with kills, load after load until the total or the time is reached."""
    every = [
        LoadScenario(family=family, sources=sources, loading=args.loading, requests=args.requests, long=long)
        for long in (True, False)
        for family in args.families
        for sources in args.sources
    ]
    if not args.kills:
        yield from every * args.repeat
        return
    number = 0
    while (left := args.kills - sum(len(one.kills) for one in done)) > 0:
        if time.monotonic() - started_s > args.minutes * 60:
            return
        plain = [scenario for scenario in every if scenario.long]
        base = asdict(plain[number % len(plain)])
        yield LoadScenario(**{**base, "kills": min(left, args.per_load)})
        number += 1


async def run(platform: LocalPlatform, args: Namespace, models: Path, into: "LiveServingResult") -> None:
    """Run all scenarios; `into` receives the results."""
    async with http_client(platform.url, platform.admin_key) as http:
        serving = into.serving = LiveServingRun(platform, http, args.seed, into.findings)
        lengths = {True: (args.tokens // 6, args.tokens), **({} if args.kills else {False: SHORT})}
        for family in args.families:
            nbytes = write_model(family, args.width, models / family)
            say(f"{family}: {nbytes / 1e6:.1f} MB; recording one node's tokens")
            await serving.deploy(family, models / family, lengths)
        started_s = time.monotonic()
        for scenario in scenarios(args, serving.rounds, started_s):
            done = await serving.run_scenario(scenario)
            killed = sum(len(one.kills) for one in serving.rounds)
            say(f"{show(done)}; {killed} kills in total, {into.findings.count} findings")
            if into.findings.too_many:
                break
        into.ledger = await check_ledger(serving)


class LiveServingResult:
    """The results so far, also of an interrupted run."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.serving: LiveServingRun | None = None
        self.ledger: dict[str, Any] = {}


def record_of(outcome: LiveServingResult, params: dict[str, object]) -> dict[str, Any]:
    rounds = outcome.serving.rounds if outcome.serving is not None else []
    kills = [kill for one in rounds for kill in one.kills]
    answers = [answer for one in rounds for answer in one.answers]
    return {
        "name": "live-serving-kills" if kills else "live-serving",
        "params": params,
        "loads": [load_record(one) for one in rounds],
        "requests": len(answers),
        "live": sum(answer.start_kind == "live" for answer in answers),
        "tokens": sum(len(answer.ids) for answer in answers),
        "moves": sum(one.moves for one in rounds),
        "kills": len(kills),
        "kills_by_place": dict(Counter("head" if kill.is_head else "other" for kill in kills)),
        "ledger": outcome.ledger,
        "wrong": outcome.findings.count,
        "failed": outcome.findings.failed,
    }


def load_record(one: LoadRound) -> dict[str, Any]:
    return {
        **asdict(one.scenario),
        "seconds": round(one.seconds, 2),
        "first_live_s": None if one.first_live_s is None else round(one.first_live_s, 3),
        "ready_s": one.ready_s,
        "requests_made": len(one.answers),
        "live": sum(answer.start_kind == "live" for answer in one.answers),
        "moves": one.moves,
        "kills": [asdict(kill) for kill in one.kills],
    }


def show_record(record: dict[str, Any]) -> str:
    """Format the record's totals, and a line per finding."""
    skipped = ("name", "params", "loads", "failed")
    totals = {key: value for key, value in record.items() if key not in skipped}
    return "\n".join([str(totals), *(f"WRONG: {line}" for line in record["failed"])])


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = benchmark_parser("benchmarks.live_serving", __doc__)
    add = parser.add_argument
    add("--families", type=some_of(FAMILIES), default=",".join(FAMILIES), help="of these families")
    add("--sources", type=comma_list(at_least(1)), default="1,2,3", help="nodes that hold the model")
    add_load(parser, requests=64, tokens=360)
    add("--repeat", type=at_least(1), default=1, help="loads per scenario, without kills")
    add("--kills", type=at_least(0), default=0, help="kills of nodes that serve in pipelines")
    add("--per-load", type=at_least(1), default=3, help="maximum kills per load")
    add("--minutes", type=positive, default=60.0, help="start no load after this many minutes")
    add_platform(parser, width=128, link_rate="5mbit")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    outcome = LiveServingResult()
    nodes = max(args.sources) + args.loading
    params = {**all_but(args), "nodes": nodes, **describe_run("benchmarks.live_serving")}
    started_s = time.monotonic()
    with recording("live_serving", json=args.json, show=show_record, failures=PLATFORM_FAILURES) as out:
        try:
            with TemporaryDirectory() as folder, slow_link_platform(args, nodes) as platform:
                uvloop.run(run(platform, args, Path(folder), outcome))
        finally:
            params["seconds"] = round(time.monotonic() - started_s, 1)
            out.add(record_of(outcome, params))
    if outcome.findings.count:
        sys.exit(f"live_serving: {outcome.findings.count} findings (see WRONG above)")


if __name__ == "__main__":
    main()
