"""Kill random processes of a platform under load, and check responses, ledger and meters.

Starts a platform of its own (2 gateways, 3 nodes on 3 hosts), keeps a mixed load of several tenants running,
and kills random processes with SIGKILL, sometimes two at once, each time until the service responds again.
Every response is compared with its request's fault-free response; every acknowledged request must be in the
ledger once, as its client saw it; at the end the accelerators' time must add up to the microsecond. It exits
with 1 after any finding, and then keeps the platform's folder with its logs.

example:
  python -m benchmarks.chaos --kills 300 --json chaos.json
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.chaos.check import Findings
from benchmarks.chaos.load import IssuedRequest, RequestFate
from benchmarks.chaos.run import ChaosRun, ComponentKill, KillPlan, chaos_platform, check_ledger, run_kills
from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.local_platform import LocalPlatform
from benchmarks.harness.percentile import percentile
from benchmarks.harness.records import chosen, describe_run, recording, timed


async def run(platform: LocalPlatform, findings: Findings, plan: KillPlan) -> tuple[ChaosRun, dict[str, Any]]:
    """Run all kills; return the run and the ledger's summary."""
    chaos = await run_kills(platform, findings, plan, progress=True)
    return chaos, await check_ledger(chaos)


# Records.


def kill_record(
    name: str, kills: Sequence[ComponentKill], limit_s: float, params: dict[str, object]
) -> dict[str, Any]:
    seconds = [round(kill.recovery_s, 3) for kill in kills]
    return {
        **timed(name, params, seconds),
        "kills": len(kills),
        "p95_s": percentile(seconds, 95),
        "max_s": max(seconds),
        "limit_s": limit_s,
        "restart_median_s": round(statistics.median(kill.restart_s for kill in kills), 3),
    }


def request_counts(issued: Sequence[IssuedRequest]) -> dict[str, Any]:
    """Count how requests ended, in total and by kind, with the longest duration."""
    fates = Counter(str(one.fate) for one in issued)
    return {
        "requests": len(issued),
        **{str(fate): fates[fate] for fate in RequestFate},
        "acknowledged_by_work": dict(
            sorted(Counter(one.work for one in issued if one.fate is RequestFate.ACKNOWLEDGED).items())
        ),
        "codes": dict(sorted(Counter(one.code for one in issued if one.code).items())),
        "longest_s": round(max(one.ended_s - one.sent_s for one in issued), 3),
    }


def records_of(chaos: ChaosRun, ledger: dict[str, Any], params: dict[str, object]) -> list[dict[str, Any]]:
    found = [
        kill_record(f"kill-{kind}", kills, chaos.plan.recovery_s, params)
        for kind in sorted({kill.component.kind for kill in chaos.kills})
        if (kills := [kill for kill in chaos.kills if kill.component.kind is kind])
    ]
    whole = {
        "name": "chaos",
        "params": params,
        "kills": len(chaos.kills),
        **request_counts(chaos.load.issued),
        "ledger": ledger,
        "wrong": chaos.findings.count,
        "failed": chaos.findings.failed,
    }
    return [*found, whole]


def show(row: dict[str, Any]) -> str:
    """Format a record: recovery times of one kind, or the totals with a line per finding."""
    if row["name"] != "chaos":
        recovery = f"median {row['median_s']:.2f} s, max {row['max_s']:.2f} s"
        return f"{row['name']:13} {row['kills']:4}  recovery {recovery}"
    totals = {key: value for key, value in row.items() if key not in ("name", "params", "failed")}
    return "\n".join([str(totals), *(f"WRONG: {line}" for line in row["failed"])])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.chaos", __doc__)
    add = parser.add_argument
    add("--kills", type=int, default=300, help="kills")
    add("--seed", type=int, default=1, help="seed of the random choices")
    add("--clients", type=int, default=8, help="concurrent clients")
    add("--tokens", type=int, default=96, help="tokens per stream")
    add("--limit", type=float, default=15.0, help="seconds until a client times out")
    add("--recovery", type=float, default=5.0, help="allowed seconds from a restart to a correct response")
    add("--data-dir", type=Path, help="keep the platform's folder here (default: a temporary folder)")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    findings = Findings()
    plan = KillPlan(
        **chosen(args, "seed", "kills", "clients", "tokens"), limit_s=args.limit, recovery_s=args.recovery
    )
    params = {
        "nodes": 3,
        "gateways": 2,
        **chosen(args, "kills", "seed", "clients", "tokens"),
        "limit_s": args.limit,
        **describe_run("benchmarks.chaos"),
    }
    started_s = time.monotonic()
    with recording("chaos", json=args.json, show=show) as out:
        with chaos_platform(args.data_dir, findings, nodes=3, gateways=2) as platform:
            chaos, ledger = uvloop.run(run(platform, findings, plan))
        params["seconds"] = round(time.monotonic() - started_s, 1)
        out.add(*records_of(chaos, ledger, params))
    if findings.count:
        sys.exit(f"chaos: {findings.count} findings (see WRONG above); logs are in {platform.data / 'logs'}")


if __name__ == "__main__":
    main()
