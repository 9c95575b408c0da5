"""Requests served by nodes while these load, with stages killed at random tokens: is any token other?

Starts a platform of its own (a gateway, `--sources` + `--loading` nodes on hosts of their own, links so slow
that a load takes seconds) with small random fp32 models of three families. In each load `--requests` are
under way all the time, half greedy, half drawn with seeds; their tokens are compared with those of one node.
Long requests outlast the load, so that they go on elsewhere as nodes come to serve alone. With `--kills`
nodes of pipelines are killed with SIGKILL, `--per-load` in each load, until there were so many. At the end
each request must be in the ledger once, with the time of each member, and the meters must add up.
It exits with 1 if anything is found wrong.

  python -m benchmarks.live_serving --json FILE      every family, k = 1, 2, 3, with and without a switch
  python -m benchmarks.live_serving --kills 100 --json FILE
"""

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from subprocess import SubprocessError
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import uvloop

from benchmarks.arguments import at_least, listed, parser_of, positive, say
from benchmarks.chaos_check import Findings
from benchmarks.chaos_cluster import Cluster
from benchmarks.endings import end_politely
from benchmarks.live_serving_arguments import add_load, add_platform
from benchmarks.live_serving_cluster import NotThere, platform
from benchmarks.live_serving_models import FAMILIES, write_model
from benchmarks.live_serving_run import Round, Scene, Serving, close_books, show
from benchmarks.machine import describe_machine, write_records

SHORT = (8, 24)  # tokens of requests that end before the load does


def scenes(args: Namespace, done: list[Round], began_s: float) -> Iterator[Scene]:
    """Those that are asked for; with kills, load after load until there were enough, or time is over."""
    every = [
        Scene(family=family, sources=sources, loading=args.loading, requests=args.requests, long=long)
        for long in (True, False)
        for family in args.families
        for sources in args.sources
    ]
    if not args.kills:
        yield from every * args.repeat
        return
    number = 0
    while (left := args.kills - sum(len(one.kills) for one in done)) > 0:
        if time.monotonic() - began_s > args.minutes * 60:
            return
        plain = [scene for scene in every if scene.long]
        base = asdict(plain[number % len(plain)])
        yield Scene(**{**base, "kills": min(left, args.per_load)})
        number += 1


async def run(cluster: Cluster, args: Namespace, models: Path, into: "Outcome") -> None:
    """All scenes; what is found goes to `into`."""
    headers = {"authorization": f"Bearer {cluster.admin_key}"}
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(
        base_url=cluster.urls[0], headers=headers, limits=limits, timeout=120.0, trust_env=False
    ) as http:
        serving = into.serving = Serving(cluster, http, args.seed, into.findings)
        lengths = {True: (args.tokens // 6, args.tokens), **({} if args.kills else {False: SHORT})}
        for family in args.families:
            nbytes = write_model(family, args.width, models / family)
            say(f"{family}: {nbytes / 1e6:.1f} MB; learning what one node says")
            await serving.deploy(family, models / family, lengths)
        began_s = time.monotonic()
        for scene in scenes(args, serving.rounds, began_s):
            done = await serving.play(scene)
            killed = sum(len(one.kills) for one in serving.rounds)
            say(f"{show(done)}; {killed} kills in all, {into.findings.count} wrong")
            if into.findings.hopeless:
                break
        into.ledger = await close_books(serving)


class Outcome:
    """What is known so far, also of a run that is cut short."""

    def __init__(self) -> None:
        self.findings = Findings()
        self.serving: Serving | None = None
        self.ledger: dict[str, Any] = {}


def record_of(outcome: Outcome, params: dict[str, object]) -> dict[str, Any]:
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


def load_record(one: Round) -> dict[str, Any]:
    return {
        **asdict(one.scene),
        "seconds": round(one.seconds, 2),
        "first_live_s": None if one.first_live_s is None else round(one.first_live_s, 3),
        "ready_s": one.ready_s,
        "requests_made": len(one.answers),
        "live": sum(answer.start_kind == "live" for answer in one.answers),
        "moves": one.moves,
        "kills": [asdict(kill) for kill in one.kills],
    }


@contextmanager
def folder_of_models() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hypercast-live-models-") as folder:
        yield Path(folder)


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = parser_of("benchmarks.live_serving", __doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the record to this file")
    add("--families", type=listed(str, tuple(FAMILIES)), default=list(FAMILIES), help="such as llama,gpt2")
    add("--sources", type=listed(at_least(1)), default=[1, 2, 3], help="nodes that hold the model (1,2,3)")
    add_load(parser, requests=64, tokens=360)
    add("--repeat", type=at_least(1), default=1, help="how often each load is made, without kills")
    add("--kills", type=at_least(0), default=0, help="of nodes that serve in pipelines")
    add("--per-load", type=at_least(1), default=3, help="kills in one load at most (default 3)")
    add("--minutes", type=positive, default=60.0, help="begin no load after so many (default 60)")
    add_platform(parser, width=128, link_rate="5mbit")
    return parser.parse_args(arguments)


def main() -> None:
    end_politely()
    args = parse()
    outcome = Outcome()
    given = {name: value for name, value in vars(args).items() if name not in ("json", "data_dir")}
    params = {
        **given,
        "nodes": max(args.sources) + args.loading,
        **describe_machine("benchmarks.live_serving"),
    }
    began_s, failure = time.monotonic(), ""
    try:
        nodes = max(args.sources) + args.loading
        with folder_of_models() as models, platform(args, nodes) as cluster:
            uvloop.run(run(cluster, args, models, outcome))
    except (NotThere, RuntimeError, OSError, SubprocessError, httpx2.HTTPError, ExceptionGroup) as error:
        failure = f"live_serving: {error!r}"
    except KeyboardInterrupt:
        failure = "live_serving: interrupted"
    params["seconds"] = round(time.monotonic() - began_s, 1)
    record = record_of(outcome, params)
    print({key: value for key, value in record.items() if key not in ("name", "params", "loads", "failed")})
    for line in outcome.findings.failed:
        print(f"WRONG: {line}")
    if args.json:
        write_records(args.json, [record])
    if failure:
        print(failure, file=sys.stderr)
        sys.exit(130 if failure.endswith("interrupted") else 1)
    if outcome.findings.count:
        sys.exit(f"{outcome.findings.count} things are wrong")


if __name__ == "__main__":
    main()
