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

from benchmarks.chaos import records_of
from benchmarks.chaos_check import Findings
from benchmarks.chaos_cluster import Cluster, Kind
from benchmarks.chaos_run import Chaos, Storm, close_books, platform, rage
from benchmarks.chaos_watch import Watch
from benchmarks.machine import describe_machine, write_records

SECONDS = float(os.environ.get("HYPERCAST_SOAK_SECONDS", "1200"))
SETTLED_S = min(300.0, SECONDS / 4)
RESULT = os.environ.get("HYPERCAST_SOAK_JSON", "")


async def watched(cluster: Cluster, findings: Findings, storm: Storm) -> tuple[Chaos, Watch]:
    watch = Watch(cluster)
    watching = asyncio.create_task(watch.run())
    try:
        return await rage(cluster, findings, storm, told=True), watch
    finally:
        watching.cancel()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 1.5 + 600)
def test_everything_holds_for_minutes(tmp_path: Path) -> None:
    findings = Findings()
    with platform(tmp_path, findings, nodes=3, gateways=2) as cluster:
        supervisor = next(part for part in cluster.parts if part.kind is Kind.SUPERVISOR)
        spared = frozenset({cluster.gateways[1], cluster.nodes[0], supervisor})
        ends = (Kind.SUPERVISOR,)
        storm = Storm(seed=5, seconds=SECONDS, pause_s=(5.0, 15.0), spared=spared, first=ends, last=ends)

        async def soak() -> tuple[Chaos, Watch, dict[str, object]]:
            chaos, watch = await watched(cluster, findings, storm)
            return chaos, watch, await close_books(chaos)

        chaos, watch, ledger = asyncio.run(soak())
    growths = watch.growths(chaos.outages[0].to_s + SETTLED_S, chaos.kills[-1].at_s)
    findings.add([growth.failure for growth in growths if growth.failure])
    if RESULT:
        params = {"asked_s": SECONDS, "settled_s": SETTLED_S, **describe_machine("tests.test_soak")}
        rows = [dict(row, name=f"soak-{row['name']}") for row in records_of(chaos, ledger, params)]
        rows[-1]["growth"] = [growth.record() for growth in growths]
        write_records(Path(RESULT), rows)
        watch.write_csv(Path(RESULT).with_suffix(".csv"))
    assert {growth.name for growth in growths} >= {"gateway-1", "node-0", "supervisor"}
    assert chaos.kills[-1].part is supervisor
    assert {kill.part.kind for kill in chaos.kills} == {part.kind for part in cluster.parts}
    assert not findings.failed, "\n".join(findings.failed)
