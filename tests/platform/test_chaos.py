"""A short storm of kills, and that its judges see what is wrong."""

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos_check import Books, Findings, Outage, wrong_answers, wrong_books, wrong_sums
from benchmarks.chaos_cluster import Kind, Part
from benchmarks.chaos_load import Asked, Fate
from benchmarks.chaos_run import Chaos, Storm, close_books, platform, rage
from benchmarks.chaos_watch import Growth, anonymous, descriptors
from registry.usage import GpuSlice
from tests.patience import PATIENCE_S
from tests.registry_records import request

GATEWAY, REDIS = Part(Kind.GATEWAY, "gateway"), Part(Kind.REDIS, "redis")
ASKED = Asked(
    request_id="load-1",
    work="whole",
    function="coder",
    tenant="acme",
    gateway=0,
    sent_s=10.0,
    ended_s=11.0,
    fate=Fate.ACKNOWLEDGED,
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
    with platform(tmp_path, findings, nodes=3, gateways=2) as cluster:
        # The bounds are wide, as tests run on busy machines; the benchmark has the true ones.
        each = Counter(Kind)
        bounds = {"limit_s": PATIENCE_S, "recovery_s": PATIENCE_S}
        storm = Storm(seed=11, kills=6, deck=each, clients=5, tokens=48, **bounds)

        async def run() -> tuple[Chaos, dict[str, object]]:
            chaos = await rage(cluster, findings, storm)
            return chaos, await close_books(chaos)

        chaos, ledger = asyncio.run(run())
    assert not findings.failed, "\n".join(findings.failed)
    assert ledger["verdict"] == "exact"
    assert {kill.part.kind for kill in chaos.kills} == set(Kind)
    assert sum(one.fate is Fate.ACKNOWLEDGED for one in chaos.load.asked) > 20


def test_the_books_are_compared_request_by_request() -> None:
    assert wrong_books([ASKED], [RECORD]) == []
    assert "not in the ledger" in wrong_books([ASKED], [])[0]
    again = replace(RECORD, request_id="load-1~ab")
    assert wrong_books([ASKED, ASKED], [RECORD, again]) == []
    assert len(wrong_books([ASKED, ASKED], [RECORD])) == 1
    assert "2 times" in wrong_books([ASKED], [RECORD, again])[0]
    assert "nobody asked" in wrong_books([], [RECORD])[0]
    for change in ({"completion_tokens": 6}, {"tenant": "bolt"}, {"billed_gpu_ms": 1}):
        assert len(wrong_books([ASKED], [replace(RECORD, **change)])) == 1, change
    cut = replace(ASKED, fate=Fate.CUT)
    assert wrong_books([cut], []) == wrong_books([cut], [RECORD]) == []


def test_an_outage_excuses_what_it_explains_and_nothing_else() -> None:
    gateways = [GATEWAY, Part(Kind.GATEWAY, "gateway-1")]
    killed = Outage(part=GATEWAY, from_s=10.5, to_s=12.0)
    no_redis = Outage(part=REDIS, from_s=10.5, to_s=12.0)
    cut = replace(ASKED, fate=Fate.CUT)
    refused = replace(ASKED, fate=Fate.REFUSED, status=503, code="state_unavailable")
    unbilled = replace(ASKED, fate=Fate.FAILED, code="billing_failed")
    hung = replace(ASKED, fate=Fate.HUNG)
    broken = replace(ASKED, fate=Fate.FAILED, status=500, code="function_error")
    no_handler = replace(no_redis, part=Part(Kind.HANDLER, "handler"))
    nothing = replace(no_redis, part=Part(Kind.SUPERVISOR, "supervisor"))
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
        (replace(ASKED, fate=Fate.WRONG), no_redis),
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
    books = Books(records=[RECORD], intervals=[], lost=[])
    assert wrong_sums([row], books.records) == []
    assert len(wrong_sums([row | {"requests": 2}], books.records)) == 1
    assert len(wrong_sums([], books.records)) == len(wrong_sums([row], [])) == 1


def test_a_process_may_grow_by_a_twentieth_and_by_two_descriptors() -> None:
    steady = Growth(
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
    own = descriptors(os.getpid())
    assert own.total() >= 3 and anonymous(os.getpid()) > 1 << 20
