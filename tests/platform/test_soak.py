"""Minutes of mixed load under random kills of every kind of process: all answers, bills and meters hold.

`HYPERCAST_SOAK_SECONDS` is how long (1200), `HYPERCAST_SOAK_JSON` a file for the result; samples of memory
and descriptors go beside it as CSV. The supervisor, with which all ends, is killed first and again when
all has been watched. In between it, one gateway and one node are spared, so that there are processes that
live all the time: these may not grow by more than 5 % after their first five minutes.
"""

import asyncio
import os
from pathlib import Path

import pytest

from benchmarks.chaos.check import Findings
from benchmarks.chaos.command import records_of
from benchmarks.chaos.run import ChaosRun, KillPlan, chaos_platform, check_ledger, run_kills
from benchmarks.chaos.watch import ProcessMonitor
from benchmarks.harness.local_platform import ComponentKind, LocalPlatform
from benchmarks.harness.records import describe_run, write_records

SECONDS = float(os.environ.get("HYPERCAST_SOAK_SECONDS", "1200"))
SETTLED_S = min(300.0, SECONDS / 4)
RESULT = os.environ.get("HYPERCAST_SOAK_JSON", "")


async def watched(
    platform: LocalPlatform, findings: Findings, plan: KillPlan
) -> tuple[ChaosRun, ProcessMonitor]:
    watch = ProcessMonitor(platform)
    watching = asyncio.create_task(watch.run())
    try:
        return await run_kills(platform, findings, plan, progress=True), watch
    finally:
        watching.cancel()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 1.5 + 600)
def test_everything_holds_for_minutes(tmp_path: Path) -> None:
    findings = Findings()
    with chaos_platform(tmp_path, findings, nodes=3, gateways=2) as platform:
        supervisor = next(one for one in platform.components if one.kind is ComponentKind.SUPERVISOR)
        spared = frozenset({platform.gateways[1], platform.nodes[0], supervisor})
        ends = (ComponentKind.SUPERVISOR,)
        plan = KillPlan(seed=5, seconds=SECONDS, pause_s=(5.0, 15.0), spared=spared, first=ends, last=ends)

        async def soak() -> tuple[ChaosRun, ProcessMonitor, dict[str, object]]:
            chaos, watch = await watched(platform, findings, plan)
            return chaos, watch, await check_ledger(chaos)

        chaos, watch, ledger = asyncio.run(soak())
    growths = watch.growths(chaos.outages[0].to_s + SETTLED_S, chaos.kills[-1].at_s)
    findings.add([growth.failure for growth in growths if growth.failure])
    if RESULT:
        params = {"asked_s": SECONDS, "settled_s": SETTLED_S, **describe_run("tests.platform.test_soak")}
        rows = [dict(row, name=f"soak-{row['name']}") for row in records_of(chaos, ledger, params)]
        rows[-1]["growth"] = [growth.record() for growth in growths]
        write_records(Path(RESULT), rows)
        watch.write_csv(Path(RESULT).with_suffix(".csv"))
    assert {growth.name for growth in growths} >= {"gateway-1", "node-0", "supervisor"}
    assert chaos.kills[-1].component is supervisor
    assert {kill.component.kind for kill in chaos.kills} == {one.kind for one in platform.components}
    assert not findings.failed, "\n".join(findings.failed)
