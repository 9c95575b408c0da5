"""A short series of kills, and that its checks find violations."""

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.chaos.check import (
    Findings,
    LedgerSnapshot,
    Outage,
    ledger_mismatches,
    wrong_answers,
    wrong_sums,
)
from benchmarks.chaos.load import IssuedRequest, RequestFate
from benchmarks.chaos.run import ChaosRun, KillPlan, chaos_platform, check_ledger, run_kills
from benchmarks.chaos.watch import ResourceGrowth, anonymous_bytes
from benchmarks.harness.local_platform import Component, ComponentKind
from benchmarks.harness.processor import open_descriptors
from registry.records.usage import GpuSlice
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import request

GATEWAY, REDIS = Component(ComponentKind.GATEWAY, "gateway"), Component(ComponentKind.REDIS, "redis")
ASKED = IssuedRequest(
    request_id="load-1",
    work="whole",
    function="coder",
    tenant="acme",
    gateway=0,
    sent_s=10.0,
    ended_s=11.0,
    fate=RequestFate.ACKNOWLEDGED,
    prompt_tokens=5,
    completion_tokens=7,
)
RECORD = request(
    "load-1",
    function="coder",
    received_at=1.0,
    started_at=1.0,
    ended_at=2.0,
    billed_gpu_ms=2,
    prompt_tokens=5,
    completion_tokens=7,
    cost_nanos=3,
    gpu=(GpuSlice(call_id="load-1/0", instance_id="i", node="node-0", gpu_us=1500),),
)


@pytest.mark.timeout(900)
def test_nothing_is_lost_in_a_short_storm(tmp_path: Path) -> None:
    findings = Findings()
    with chaos_platform(tmp_path, findings, nodes=3, gateways=2) as platform:
        # The bounds are wide, as tests run on busy machines; the benchmark has the true ones.
        each = Counter(ComponentKind)
        bounds = {"limit_s": PATIENCE_S, "recovery_s": PATIENCE_S}
        plan = KillPlan(seed=11, kills=6, deck=each, clients=5, tokens=48, **bounds)

        async def run() -> tuple[ChaosRun, dict[str, object]]:
            chaos = await run_kills(platform, findings, plan)
            return chaos, await check_ledger(chaos)

        chaos, ledger = asyncio.run(run())
    assert not findings.failed, "\n".join(findings.failed)
    assert ledger["verdict"] == "exact"
    assert {kill.component.kind for kill in chaos.kills} == set(ComponentKind)
    assert sum(one.fate is RequestFate.ACKNOWLEDGED for one in chaos.load.issued) > 20


def test_the_books_are_compared_request_by_request() -> None:
    assert ledger_mismatches([ASKED], [RECORD]) == []
    assert "not in the ledger" in ledger_mismatches([ASKED], [])[0]
    again = msgspec.structs.replace(RECORD, request_id="req-2", client_request_id="load-1")
    assert ledger_mismatches([ASKED, ASKED], [RECORD, again]) == []
    assert len(ledger_mismatches([ASKED, ASKED], [RECORD])) == 1
    assert "2 times" in ledger_mismatches([ASKED], [RECORD, again])[0]
    assert "no client sent it" in ledger_mismatches([], [RECORD])[0]
    for change in ({"completion_tokens": 6}, {"tenant": "bolt"}, {"billed_gpu_ms": 1}):
        assert len(ledger_mismatches([ASKED], [msgspec.structs.replace(RECORD, **change)])) == 1, change
    cut = replace(ASKED, fate=RequestFate.CUT)
    assert ledger_mismatches([cut], []) == ledger_mismatches([cut], [RECORD]) == []


def test_an_outage_excuses_what_it_explains_and_nothing_else() -> None:
    gateways = [GATEWAY, Component(ComponentKind.GATEWAY, "gateway-1")]
    killed = Outage(component=GATEWAY, from_s=10.5, to_s=12.0)
    no_redis = Outage(component=REDIS, from_s=10.5, to_s=12.0)
    cut = replace(ASKED, fate=RequestFate.CUT)
    refused = replace(ASKED, fate=RequestFate.REFUSED, status=503, code="state_unavailable")
    unbilled = replace(ASKED, fate=RequestFate.FAILED, code="billing_failed")
    hung = replace(ASKED, fate=RequestFate.HUNG)
    broken = replace(ASKED, fate=RequestFate.FAILED, status=500, code="function_error")
    no_handler = replace(no_redis, component=Component(ComponentKind.HANDLER, "handler"))
    nothing = replace(no_redis, component=Component(ComponentKind.SUPERVISOR, "supervisor"))
    assert wrong_answers([ASKED, cut], [killed], gateways) == []
    assert wrong_answers([refused, unbilled], [no_redis], gateways) == []
    assert wrong_answers([broken], [no_handler], gateways) == []
    assert wrong_answers([cut, replace(cut, gateway=1), refused, unbilled, hung], [nothing], gateways) == []
    for one, outage in (
        (cut, no_redis),
        (replace(cut, gateway=1), killed),
        (replace(cut, sent_s=20.0, ended_s=21.0), killed),
        (unbilled, killed),
        (broken, no_redis),
        (unbilled, no_handler),
        (replace(unbilled, code="internal"), no_redis),
        (hung, no_redis),
        (replace(ASKED, fate=RequestFate.WRONG), no_redis),
    ):
        assert len(wrong_answers([one], [outage], gateways)) == 1, one


def test_the_report_is_held_against_its_rows() -> None:
    row = {
        "function": "coder",
        "tenant": "acme",
        "requests": 1,
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "billed_gpu_ms": 2,
        "cost_nanos": 3,
    }
    books = LedgerSnapshot(records=[RECORD], intervals=[], lost=[])
    assert wrong_sums([row], books.records) == []
    assert len(wrong_sums([row | {"requests": 2}], books.records)) == 1
    assert len(wrong_sums([], books.records)) == len(wrong_sums([row], [])) == 1


def test_a_process_may_grow_by_a_twentieth_and_by_two_descriptors() -> None:
    steady = ResourceGrowth(
        name="node-0",
        pid=1,
        anon_before=100.0,
        anon_after=105.0,
        rss_before=100.0,
        rss_after=200.0,
        fds_before=20.0,
        fds_after=22.0,
        opened={"socket": 3},
        closed={"pipe": 1},
    )
    assert steady.failure == ""
    assert json.loads(json.dumps(steady.record()))["anon_growth"] == 0.05
    assert "memory of node-0" in replace(steady, anon_after=106.0).failure
    assert "new {'socket': 3}" in replace(steady, fds_after=23.0).failure
    own = open_descriptors(os.getpid())
    assert own.total() >= 3 and anonymous_bytes(os.getpid()) > 1 << 20
