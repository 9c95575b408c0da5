"""Random kills of every kind of process under load, and what clients, the ledger and the meters say.

`python -m benchmarks.chaos --kills 300 --json FILE` starts a platform of its own (2 gateways, 3 nodes on
3 hosts), keeps up a mixed load of several tenants, and kills random processes with SIGKILL, at times two
at once, each time until the service answers again. Every answer is compared with what its request gives
without faults; every acknowledged request must be in the ledger once, as its client saw it; when all is
quiet, the accelerators' time must add up to the microsecond. It exits with 1 if anything is found wrong,
and leaves the platform's folder with its logs then.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.arguments import parser_of
from benchmarks.chaos_check import Findings
from benchmarks.chaos_cluster import Cluster
from benchmarks.chaos_load import Asked, Fate
from benchmarks.chaos_run import Chaos, Kill, Storm, close_books, platform, rage
from benchmarks.endings import end_politely
from benchmarks.machine import describe_machine, write_records
from benchmarks.percentile import percentile


async def run(cluster: Cluster, findings: Findings, storm: Storm) -> tuple[Chaos, dict[str, Any]]:
    """The whole storm; returns it and what is told of the ledger."""
    chaos = await rage(cluster, findings, storm, told=True)
    return chaos, await close_books(chaos)


# What is told.


def kill_record(
    name: str, kills: Sequence[Kill], limit_s: float, params: dict[str, object]
) -> dict[str, Any]:
    seconds = [round(kill.recovery_s, 3) for kill in kills]
    return {
        "name": name,
        "params": params,
        "kills": len(kills),
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "p95_s": percentile(seconds, 95),
        "max_s": max(seconds),
        "limit_s": limit_s,
        "restart_median_s": round(statistics.median(kill.restart_s for kill in kills), 3),
    }


def request_counts(asked: Sequence[Asked]) -> dict[str, Any]:
    """How requests ended, in all and by what was asked; and the longest that one took."""
    fates = Counter(str(one.fate) for one in asked)
    return {
        "requests": len(asked),
        **{str(fate): fates[fate] for fate in Fate},
        "acknowledged_by_work": dict(
            sorted(Counter(one.work for one in asked if one.fate is Fate.ACKNOWLEDGED).items())
        ),
        "codes": dict(sorted(Counter(one.code for one in asked if one.code).items())),
        "longest_s": round(max(one.ended_s - one.sent_s for one in asked), 3),
    }


def records_of(chaos: Chaos, ledger: dict[str, Any], params: dict[str, object]) -> list[dict[str, Any]]:
    found = [
        kill_record(f"kill-{kind}", kills, chaos.storm.recovery_s, params)
        for kind in sorted({kill.part.kind for kill in chaos.kills})
        if (kills := [kill for kill in chaos.kills if kill.part.kind is kind])
    ]
    whole = {
        "name": "chaos",
        "params": params,
        "kills": len(chaos.kills),
        **request_counts(chaos.load.asked),
        "ledger": ledger,
        "wrong": chaos.findings.count,
        "failed": chaos.findings.failed,
    }
    return [*found, whole]


def main() -> None:
    end_politely()
    parser = parser_of("benchmarks.chaos", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="of a stream")
    parser.add_argument("--limit", type=float, default=15.0, help="seconds that a client waits")
    parser.add_argument("--recovery", type=float, default=5.0, help="seconds from a restart to a good answer")
    parser.add_argument("--data-dir", type=Path, help="the platform's folder, which then stays")
    args = parser.parse_args()
    findings = Findings()
    storm = Storm(
        seed=args.seed,
        kills=args.kills,
        clients=args.clients,
        tokens=args.tokens,
        limit_s=args.limit,
        recovery_s=args.recovery,
    )
    params = {
        "nodes": 3,
        "gateways": 2,
        "kills": args.kills,
        "seed": args.seed,
        "clients": args.clients,
        "tokens": args.tokens,
        "limit_s": args.limit,
        **describe_machine("benchmarks.chaos"),
    }
    began_s = time.monotonic()
    with platform(args.data_dir, findings, nodes=3, gateways=2) as cluster:
        chaos, ledger = uvloop.run(run(cluster, findings, storm))
    params["seconds"] = round(time.monotonic() - began_s, 1)
    rows = records_of(chaos, ledger, params)
    for row in rows[:-1]:
        recovery = f"median {row['median_s']:.2f} s, max {row['max_s']:.2f} s"
        print(f"{row['name']:13} {row['kills']:4}  recovery {recovery}")
    print({key: value for key, value in rows[-1].items() if key not in ("name", "params", "failed")})
    for line in findings.failed:
        print(f"WRONG: {line}")
    if args.json:
        write_records(args.json, rows)
    if findings.count:
        sys.exit(f"{findings.count} things are wrong; logs are in {cluster.data / 'logs'}")


if __name__ == "__main__":
    main()
