"""What a trace run sees, and what its figures mean."""

import asyncio
import json
import time
from dataclasses import replace as replace_answer
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.harness.percentile import quantiles
from benchmarks.harness.stream_client import StreamResult
from benchmarks.testbed.link_meter import LinkBytes
from benchmarks.trace import command
from benchmarks.trace.client import StreamedAnswer, TraceSent
from benchmarks.trace.decisions import DecisionMonitor, SeenDecision, decision_figures
from benchmarks.trace.five_means import add_five_means, read_five_means
from benchmarks.trace.link_use import network_use
from benchmarks.trace.measures import (
    Answer,
    ModelScale,
    Slo,
    cumulated,
    five_means,
    integral,
    ttft_by_rate,
    ttft_by_start,
)
from benchmarks.trace.modes import MODES
from benchmarks.trace.plot import plot
from benchmarks.trace.records import TraceRun, compare, record_of, run_of, show
from benchmarks.trace.run import TraceResult
from benchmarks.trace.scenario import params_of, scenario_of
from benchmarks.trace.watch import SeenPlans, UsageMonitor, UsageSample
from registry.records.function import ScalingMode
from registry.records.instance import InstanceState, StartKind
from registry.records.scaling import ScalingInputs, ScalingRecord
from registry.redis.state import RedisState
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.registry_records import instance, node

SCALE = ModelScale(slower=2, scale=1000, link_bytes_s=1e6)
SLO = Slo(ttft_s=1.0, tbt_s=0.2)


def answer(ttft_s: float, tbt_s: float | None = 0.05) -> Answer:
    return Answer(due_s=0.0, ttft_s=ttft_s, tbt_s=tbt_s, tokens=5, start_kind="hot")


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 12)), min_size=1, max_size=20))
def test_time_is_summed_piece_by_piece(points: list[tuple[float, int]]) -> None:
    series = sorted((at_s, float(value)) for at_s, value in points)
    whole = integral(series, 0.0, 200.0)
    assert whole == pytest.approx(integral(series, 0.0, 70.0) + integral(series, 70.0, 200.0))
    assert 0 <= whole <= 200 * max(value for _, value in series) + 1e-6
    course = [total for _, total in cumulated(series, 0.0, 200.0)]
    assert course == sorted(course) and course[-1] == pytest.approx(whole, abs=1e-3)


def test_attainment_counts_both_latencies_and_failures() -> None:
    answers = [answer(0.5), answer(1.5), answer(0.5, 0.3), answer(1.0, None)]
    assert SLO.attainment(answers) == 0.5
    assert SLO.attainment(answers, failed=4) == 0.25 and SLO.attainment([]) == 0.0
    assert five_means([answer(0.1, 0.02), answer(0.3, None)]) == Slo(ttft_s=1.0, tbt_s=0.1)


def test_quantiles_have_the_least_and_the_greatest() -> None:
    assert quantiles(range(1000), 4) == [0, 250, 500, 749, 999] and quantiles([]) == []


def test_gaps_are_between_tokens() -> None:
    done = StreamResult(request_id="a", sent_s=0.0, first_s=1.0, last_s=1.5, completion_tokens=3)
    done.events_s = [1.0, 1.2, 1.5, 1.9]  # the last one holds the usage
    assert done.gaps_s == pytest.approx([0.2, 0.3])
    assert done.tpot_s == pytest.approx(0.25)


def sent_trace() -> TraceSent:
    def one(due_s: float, first_s: float, failure: str = "") -> StreamedAnswer:
        return StreamedAnswer(
            due_s=due_s,
            first_s=first_s,
            last_s=first_s + 1.0,
            tokens=6,
            start_kind="hot",
            failure=failure,
            gaps_us=[200_000] * 5,
        )

    return TraceSent(
        started_s=100.0,
        ended_s=40.0,
        answers=[one(0.0, 1.0), one(4.0, 14.0), one(5.0, 6.0)],
        late_s=0.002,
        processor_share=0.3,
        saturated_share=0.1,
        gpu_s=60.0,
        loading_s=2.0,
        busy_s=40.0,
        ledger={},
        ledger_ok=True,
    )


def usage(at_s: float, allocated: int, cast_bytes: int = 0) -> UsageSample:
    return UsageSample(at_s=at_s, allocated=allocated, ready=1, host_bytes=1000, cast_bytes=cast_bytes)


def run_at(slower: int = 2) -> TraceRun:
    samples = [usage(90.0, 1), usage(120.0, 2, 500), usage(130.0, 2, 700), usage(150.0, 1, 900)]
    result = TraceResult(sent=sent_trace(), samples=samples, plans=SeenPlans(casts={"a": ("tree", "given")}))
    return run_of(result, ModelScale(slower=slower, scale=1000, link_bytes_s=1e6))


def test_a_run_is_in_model_time_and_the_bytes_of_the_model() -> None:
    run = run_at()
    assert [one.ttft_s for one in run.answers] == [0.5, 5.0, 0.5] and run.answers[1].due_s == 2.0
    assert run.answers[0].tbt_s == pytest.approx(0.1) and set(run.gaps_s) == {0.1}
    assert (run.gpu_s, run.ended_s) == (30.0, 20.0)
    assert run.instances == [(0.0, 1), (10.0, 2)]  # what came after the window is not in it
    assert integral(run.instances, 0.0, run.ended_s) == 30.0
    assert run.cast_bytes == 700_000 and run.host_byte_s == 20.0 * 1000 * 1000
    assert run.answered_after_end == 0
    assert run.faults == [] and run.plans["planners"] == {"tree": 1}


def test_a_run_says_why_it_does_not_count() -> None:
    sent = sent_trace()
    bad = replace(
        sent,
        late_s=0.012,
        processor_share=0.9,
        ledger_ok=False,
        answers=[*sent.answers[:2], replace(sent.answers[2], failure="timeout")],
    )
    run = run_of(TraceResult(sent=bad, samples=[usage(90.0, 1)], plans=SeenPlans()), SCALE)
    assert run.faults == [
        "1 requests failed, the first: timeout",
        "the ledger is not exact",
        "the client was 12 ms late",
        "processors were 90% busy",
    ]
    plans = SeenPlans(sources={"a": "disk", "b": "node", "c": "disk"})
    unshaped = TraceResult(sent=sent, samples=[usage(90.0, 1)], plans=plans)
    assert run_of(unshaped, SCALE).faults == ["2 starts read the store at this machine's speed"]
    assert run_of(replace_answer(unshaped, own_disk=True), SCALE).faults == []
    row = record_of("hypercast", [run_at(), run], SLO, {})
    assert not row["counts"] and "DOES NOT COUNT" in show(row)


def test_five_times_the_mean_is_that_of_full_provisioning_or_nothing() -> None:
    runs = {name: [run_at()] for name in ("hypercast", "fixed-full")}
    rows = [record_of(name, found, SLO, {}) for name, found in runs.items()]
    answers = {name: found[0].answers for name, found in runs.items()}
    add_five_means(rows, answers)
    assert [row["slo_5x"]["of"] for row in rows] == ["fixed-full"] * 2
    assert rows[0]["slo_5x_attainment"] == 1.0
    add_five_means(rows[:1], {"hypercast": answers["hypercast"]})
    assert rows[0]["slo_5x"] is None and rows[0]["slo_5x_attainment"] is None


def test_five_times_the_mean_is_taken_from_an_earlier_record_of_the_same_scenario(tmp_path: Path) -> None:
    args = command.parse(["--minutes", "1", "--slo-from", str(tmp_path / "full.json")])
    scenario, facts = scenario_of(args)
    params = {**params_of(args, scenario, MODES["fixed-full"]), **facts}
    full = record_of("fixed-full", [run_at()], SLO, params)
    add_five_means([full], {"fixed-full": run_at().answers})
    others = [{**full, "name": "hypercast"}, json.loads(json.dumps(full))]
    args.slo_from.write_text(json.dumps(others))
    row = record_of("hypercast", [run_at()], SLO, params)
    add_five_means([row], {"hypercast": run_at().answers}, read_five_means(args.slo_from, params))
    assert row["slo_5x"] == {**full["slo_5x"], "file": "full.json"} and row["slo_5x_attainment"] == 1.0
    with pytest.raises(ValueError, match="another scenario: nodes 8, not 12"):
        read_five_means(args.slo_from, {**params, "nodes": 12})
    args.slo_from.write_text(json.dumps([{**full, "counts": False}]))
    with pytest.raises(ValueError, match="does not count"):
        read_five_means(args.slo_from, params)
    args.slo_from.write_text(json.dumps(others[:1]))
    with pytest.raises(ValueError, match="no record of fixed-full"):
        read_five_means(args.slo_from, params)


def test_first_tokens_are_apart_by_kind_of_start() -> None:
    answers = [answer(0.1), answer(0.3), replace_answer(answer(2.0), start_kind="cold")]
    found = ttft_by_start(answers)
    assert found["cold"] == {"requests": 1, "ttft_p50_s": 2.0, "ttft_p90_s": 2.0, "ttft_p99_s": 2.0}
    assert found["hot"]["requests"] == 2 and list(found) == ["cold", "hot"]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.integers(1, 3))
def test_each_request_is_in_one_group_of_its_rate(rates: list[int], runs: int) -> None:
    answers = [
        replace_answer(answer(float(rate)), due_s=second + place / 100)
        for second, rate in enumerate(rates)
        for place in range(rate)
    ] * runs
    groups = ttft_by_rate(answers, runs)
    assert sum(group["requests"] or 0 for group in groups) == len(answers)
    edges = [(group["from_per_s"] or 0, group["to_per_s"] or 0) for group in groups]
    assert edges == sorted(edges) and all(first[1] < then[0] for first, then in pairwise(edges))
    for group in groups:  # TTFTs are the rates here
        assert (group["from_per_s"] or 0) <= (group["ttft_p50_s"] or 0) <= (group["to_per_s"] or 0)


def test_records_are_made_and_drawn(tmp_path: Path) -> None:
    args = command.parse(["--trace", "azure-code", "--nodes", "4", "--modes", "hypercast,fixed-full"])
    scenario, facts = scenario_of(args)
    runs = {name: [run_at(), run_at()] for name in args.modes}
    rows = [
        record_of(name, found, SLO, {**params_of(args, scenario, MODES[name]), **facts})
        for name, found in runs.items()
    ]
    add_five_means(rows, {name: found[0].answers * 2 for name, found in runs.items()})
    row = json.loads(json.dumps(rows[0]))
    for name in (
        *("requests", "failed", "gpu_s", "slo_attainment", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
        *("tbt_p50_s", "tbt_p99_s", "host_byte_s", "cast_bytes", "ledger_ok", "client_late_p99_s"),
    ):
        assert row[name] is not None, name
    assert row["instances"] == [[0.0, 1], [10.0, 2]] and row["counts"] and row["requests"] == 6
    assert row["slo_attainment"] == pytest.approx(2 / 3) and row["slo_5x"]["of"] == "fixed-full"
    assert row["params"]["live"] == "auto" and row["params"]["late_s"]["hop_s"] <= 0.2e-3
    assert row["params"]["prompts_capped"] > 0  # the model's context is shorter than the code trace's prompts
    assert "SLO 0.667" in show(rows[0]) and "COUNT" not in show(rows[0])
    assert compare(rows) == [
        "  hypercast vs fixed-full: +0.0% GPU time, P90 TTFT 1.00 times sooner, SLO 0.667 vs 0.667"
    ]
    plot(rows, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 10_000


def links_at(at_s: float, gateway_sent: int, node_received: int) -> LinkBytes:
    return LinkBytes(at_s=at_s, received=(50, node_received, 0), sent=(gateway_sent, 20, 30))


def test_links_are_used_between_nodes_and_by_the_gateway() -> None:
    samples = [links_at(90.0, 0, 0), links_at(100.0, 1000, 1000), links_at(160.0, 7000, 61_000)]
    found = network_use(samples, 100.0, 60.0, SCALE)
    assert found["step_s"] == 0.25  # of model time, which is half of the machine's
    assert found["gateway_bytes"] == 6000 and found["between_nodes_bytes"] == 54_000 * 1000
    assert len(found["gateway_bytes_s"]) == len(found["link_share"]["n0"]) == 120
    assert set(found["gateway_bytes_s"]) == {200} and set(found["link_share"]["n1"]) == {0.0}
    assert found["link_share"]["n0"][0] == pytest.approx(1000 / 1e6, rel=0.01)
    assert network_use(samples[:1], 100.0, 60.0, SCALE) == {}


def decided(at_s: float, desired: int, calls: int, place: int = 0) -> SeenDecision:
    inputs = ScalingInputs(in_flight=calls, held=0, ready=1, starting=0)
    record = ScalingRecord(
        function="f",
        version=1,
        policy=ScalingMode.LOAD,
        desired=desired,
        reason=f"{calls} calls",
        at=0.0,
        inputs=inputs,
    )
    return SeenDecision(at_s=at_s, place=place, record=record)


def test_a_decision_is_as_late_as_the_newest_call_that_it_counted_is_old() -> None:
    (one, *_) = sent_trace().answers
    answers = [replace(one, due_s=due_s, last_s=due_s + 10) for due_s in (0.0, 1.0, 1.01, 1.02, 1.2)]
    answers += [replace(one, due_s=1.25, last_s=3.0, function=1)]
    seen = [decided(99.0, 1, 1), decided(101.1, 2, 4), decided(101.25, 3, 4), decided(112.0, 1, 1)]
    seen += [decided(101.3, 1, 1, place=1), decided(140.1, 0, 0)]
    sent = replace(sent_trace(), answers=answers)
    found = decision_figures(seen, sent, slower=2)
    # The first counted the call at 1.02; the second counts that again, not the one at 1.2, so another cause
    # has it; the third is of another function.
    assert found["decision_ms"]["count"] == 2
    assert [found["decision_ms"][name] for name in ("least", "most")] == [50.0, 80.0]
    assert found["lowered_after_s"] == {"count": 1, **dict.fromkeys(("p50", "p90", "least", "most"), 10.75)}
    assert found["decisions"][0] == (0.55, 0, 2, "4 calls") and len(found["decisions"]) == 4
    assert found["turns"] == 0
    nothing = decision_figures([], sent, 2)
    assert nothing["decision_ms"]["count"] == 0 and nothing["decision_ms"]["p50"] is None


def test_changes_turn_where_they_go_the_other_way_than_before() -> None:
    counts = [5, 1, 2, 3, 3, 2, 2, 4]  # the first two before the load has settled
    seen = [decided(131.0 + 15 * place, count, 0) for place, count in enumerate(counts)]
    seen += [decided(170.0 + place, count, 0, place=1) for place, count in enumerate((1, 2, 1))]
    assert decision_figures(seen, replace(sent_trace(), ended_s=400.0), slower=1)["turns"] == 2 + 1


async def test_decisions_are_read_as_they_change(redis_url: str) -> None:
    async with asyncio.timeout(PATIENCE_S), RedisState.connect(redis_url) as state:
        await state.put_scaling_record(decided(0.0, 1, 1).record)
        with DecisionMonitor(redis_url, ["f", "g"]) as monitor:
            await until(lambda: len(monitor.seen) == 1)
            latest = replace_answer(decided(0.0, 2, 5).record, at=time.time())
            await state.put_scaling_record(latest)
            await until(lambda: len(monitor.seen) == 2)
    assert monitor.seen[1].record == latest and monitor.seen[1].place == 0
    assert abs(monitor.seen[1].at_s - time.monotonic()) < PATIENCE_S


async def test_what_begins_in_the_window_is_seen_with_its_source(redis_url: str) -> None:
    async with asyncio.timeout(PATIENCE_S), RedisState.connect(redis_url) as state:
        epoch = await state.next_node_epoch("n0")
        await state.put_node(node("n0", epoch), 60.0)
        await state.put_instance(instance("before", state=InstanceState.READY), epoch)
        with UsageMonitor(redis_url) as monitor:
            await state.put_instance(instance("before", state=InstanceState.DRAINING), epoch)
            started = instance("i1", source="node:n7", start_kind=StartKind.COLD)
            await state.put_instance(started, epoch)
            await until(lambda: len(monitor.samples) == 3)
            await state.put_instance(replace_answer(started, state=InstanceState.STOPPED), epoch)
            await until(lambda: len(monitor.samples) == 4)
    seen = monitor.plans.record()
    assert (seen["starts"], seen["start_sources"]) == ({"cold": 1}, {"node": 1})
    assert seen["instances_per_node"] == 2
    assert [one.allocated for one in monitor.samples] == [1, 1, 2, 1]
    assert [one.ready for one in monitor.samples] == [1, 0, 0, 0]
