"""The simulated platform: requests end once, GPU time adds up, engines and placement follow the real ones."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.traces import TraceRequest
from benchmarks.scaleout.profiles import PROFILES, find_profile
from benchmarks.trace.command import parse
from benchmarks.trace.modes import MODES as TRACE_MODES
from benchmarks.trace.scenario import params_of, scenario_of
from benchmarks.trace_sim.against import measured
from benchmarks.trace_sim.arrivals import DayTrace, daily_factor, zipf_weights
from benchmarks.trace_sim.cluster import SimulatedCluster, StartTier
from benchmarks.trace_sim.command import main
from benchmarks.trace_sim.instance import EngineModel, SimulatedCall, SimulatedInstance
from benchmarks.trace_sim.modes import MODES
from benchmarks.trace_sim.observed import ObservedCapacity
from benchmarks.trace_sim.simulation import SimulatedRun, SimulationSettings, simulate
from benchmarks.trace_sim.starts import Overheads, StartTimes
from benchmarks.trace_sim.step_times import StepTimes
from gateway.planning.placement import StartCandidate, choose_starts
from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.engine import EmulatedEngine, kv_shape
from invoker.emulated.profiles import Profile, StepLoad
from invoker.engine.contract import NewSequence
from registry.messages.sampling import Sampling
from registry.records.function import Scaling, ScalingMode

PROFILE = find_profile("h800-llama2-13b")
SCALED = [name for name, mode in MODES.items() if not mode.share]


def settings_for(mode: str = "hypercast", nodes: int = 4, **scaling: Any) -> SimulationSettings:
    scaling.setdefault("policy", ScalingMode.LOAD)
    return SimulationSettings(
        profile=PROFILE,
        mode=MODES[mode],
        scaling=Scaling(**scaling),
        nodes=nodes,
        overheads=Overheads(),
        host_images=3,
        host_ttl_s=30.0,
    )


def bursts(count: int, seed: int = 1, every_s: float = 20.0, size: int = 40) -> list[TraceRequest]:
    """Return requests in bursts, with single ones between."""
    draw = random.Random(seed)
    times = [
        every_s * (at // size) + draw.random() * (every_s if at % 4 == 0 else 1.0) for at in range(count)
    ]
    return [TraceRequest(at, draw.randint(1, 3000), draw.randint(1, 300)) for at in sorted(times)]


@pytest.mark.parametrize("name", PROFILES)
@given(
    sequences=st.integers(1, 80),
    prompt=st.integers(0, 512),
    context=st.integers(0, 100_000),
    sampled=st.integers(0, 80),
)
@settings(max_examples=40)
def test_step_times_are_those_of_the_profile(
    name: str, sequences: int, prompt: int, context: int, sampled: int
) -> None:
    profile, tokens, sampled = PROFILES[name], sequences + prompt, min(sampled, sequences)
    load = StepLoad(tokens=tokens, sequences=sequences, context=context)
    expected = profile.stage_s(0, profile.model.layers, load, sampled=sampled)
    assert StepTimes(profile).step_s(tokens, sequences, context, sampled) == pytest.approx(expected)


# --- an instance


class FakeDevice:
    """The time of an engine that is driven step by step."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.clock = DeviceClock(1, now=lambda: self.now_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def run_engine(profile: Profile, requests: Sequence[TraceRequest]) -> list[tuple[float, float]]:
    """Return when the native scheduler on an emulated device yields each first and last token."""
    device = FakeDevice()
    pages = 4000 * kv_shape(profile, profile.model.layers).page_bytes
    engine = EmulatedEngine(profile, device.clock, pages, context_length=4096)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    waiting = [(str(number), request) for number, request in enumerate(requests)]
    while waiting or engine.has_work:
        if not engine.has_work:
            device.now_s = max(device.now_s, waiting[0][1].offset_s)
        while waiting and waiting[0][1].offset_s <= device.now_s:
            name, request = waiting.pop(0)
            sampling = Sampling(max_tokens=request.output_tokens, temperature=0.0)
            prompt = [5] * request.prompt_tokens
            engine.add(NewSequence(request_id=name, prompt_ids=prompt, generated_ids=[], sampling=sampling))
        for output in engine.step():
            if output.token_id is not None:
                first.setdefault(output.request_id, device.now_s)
                last[output.request_id] = device.now_s
    return [(first[str(number)], last[str(number)]) for number in range(len(requests))]


def run_instance(profile: Profile, requests: Sequence[TraceRequest]) -> list[tuple[float, float]]:
    instance = SimulatedInstance(1, 0, EngineModel(profile), ObservedCapacity(64, 1 << 20))
    calls = [SimulatedCall(one.offset_s, one.prompt_tokens, one.output_tokens) for one in requests]
    for call in calls:
        while instance.phase_ends_s <= call.arrived_s:
            instance.finish_phase()
            instance.check_integrity()
        instance.add(call, call.arrived_s)
    while instance.calls:
        instance.finish_phase()
        instance.check_integrity()
    return [(call.first_s, call.end_s) for call in calls]


@given(seed=st.integers(0, 1 << 16), rate=st.sampled_from([0.5, 4.0, 12.0]))
@settings(max_examples=15, deadline=None)
def test_an_instance_takes_as_long_as_the_native_engine(seed: int, rate: float) -> None:
    draw = random.Random(seed)
    at_s, requests = 0.0, []
    for _ in range(20):
        at_s += draw.expovariate(rate)
        requests.append(TraceRequest(at_s, draw.randint(1, 2000), draw.randint(1, 120)))
    for (first_s, end_s), (expected_s, expected_end_s), request in zip(
        run_instance(PROFILE, requests), run_engine(PROFILE, requests), requests, strict=True
    ):
        arrived_s = request.offset_s
        assert arrived_s < first_s <= end_s
        assert first_s - arrived_s == pytest.approx(expected_s - arrived_s, rel=0.1, abs=0.06)
        assert end_s - arrived_s == pytest.approx(expected_end_s - arrived_s, rel=0.05, abs=0.06)


# --- the platform


def check(run: SimulatedRun, requests: int) -> None:
    """Assert the laws of every run."""
    figures = run.figures
    run.platform.check_integrity()
    assert figures.requests == len(figures.ttft_s) == requests and figures.open_calls == 0
    assert figures.gpu_s == pytest.approx(figures.integral_s)
    assert all(0 <= count <= run.cluster.nodes for _, count in figures.instances)
    assert figures.instances[-1][1] == 0 and min(figures.ttft_s) > 0


@given(
    seed=st.integers(0, 1 << 16),
    mode=st.sampled_from(list(MODES)),
    policy=st.sampled_from(list(ScalingMode)),
    nodes=st.integers(2, 6),
    functions=st.integers(1, 2),
)
@settings(max_examples=25, deadline=None)
def test_every_request_ends_once_and_gpu_time_adds_up(
    seed: int, mode: str, policy: ScalingMode, nodes: int, functions: int
) -> None:
    each = [bursts(60, seed + number) for number in range(functions)]
    setup = settings_for(mode, max(nodes, 2 * functions), policy=policy, keep_alive_s=10.0)
    check(simulate(setup, [iter(own) for own in each], 90.0), 60 * functions)


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_instances_stop_sooner_where_their_calls_move(seed: int) -> None:
    requests = bursts(200, seed)
    runs = []
    for moves in (True, False):
        chosen = settings_for(min_instances=1)
        chosen = replace(chosen, mode=replace(chosen.mode, moves=moves))
        runs.append(simulate(chosen, [iter(requests)], requests[-1].offset_s + 60.0))
        check(runs[-1], len(requests))
    moved, finished = (run.figures for run in runs)
    assert moved.gpu_s <= 1.02 * finished.gpu_s
    assert len(moved.ttft_s) == len(finished.ttft_s) == len(requests)


def test_a_call_continues_on_the_instance_that_adopts_it() -> None:
    first, second = (
        SimulatedInstance(id_, id_, EngineModel(PROFILE), ObservedCapacity(64, 1 << 20)) for id_ in (1, 2)
    )
    call = SimulatedCall(0.0, 100, 50)
    first.add(call, 0.0)
    first.finish_phase()
    assert first.oldest is call
    taken = first.leave(first.at_s + 0.1)
    assert taken is not None and 0 < taken[1] < 49 and first.calls == 0 and first.phase_ends_s == float("inf")
    second.adopt(*taken, first.at_s)
    for instance in (first, second):
        instance.check_integrity()
    assert second.finish_phase().ended == [call] and call.end_s == second.at_s > first.at_s


def test_more_functions_than_nodes_take_turns() -> None:
    each = [bursts(40, number, size=10) for number in range(6)]
    run = simulate(settings_for(nodes=2, keep_alive_s=60.0), [iter(own) for own in each], 100.0)
    check(run, 240)
    assert max(count for _, count in run.figures.instances) == 2 and run.figures.starts["cold"] > 0


def test_free_loads_are_the_fastest() -> None:
    requests = bursts(400)
    runs = {name: simulate(settings_for(name, 8), [iter(requests)], 220.0) for name in SCALED}
    for run in runs.values():
        check(run, 400)
    mean_s = {name: sum(run.figures.ttft_s) / 400 for name, run in runs.items()}
    assert min(mean_s, key=lambda name: mean_s[name]) == "ideal"
    assert mean_s["serverlessllm"] > mean_s["hypercast"]
    full = simulate(settings_for("fixed-full", 8), [iter(requests)], 220.0).figures.gpu_s
    assert full >= 8 * 220 and all(run.figures.gpu_s < full / 2 for run in runs.values())


def test_equal_seeds_give_equal_runs_and_other_seeds_others() -> None:
    day = DayTrace.of(bursts(200), 4096)

    def figures(seed: int) -> tuple[Any, ...]:
        own = [day.arrivals(function=number, rate=0.5, hours=0.1, seed=seed) for number in range(3)]
        found = simulate(settings_for(nodes=6), own, 360.0).figures
        return found.requests, found.gpu_s, found.instances, found.ttft_s

    assert figures(1) == figures(1) != figures(2)


def test_a_thousand_nodes_take_little_time() -> None:
    day = DayTrace.of(bursts(200), 4096)
    own = [
        day.arrivals(function=number, rate=20 * weight, hours=1 / 24, seed=1, start_h=12)
        for number, weight in enumerate(zipf_weights(200))
    ]
    began_s = time.process_time()
    run = simulate(settings_for(nodes=1000), own, 150.0)
    assert time.process_time() - began_s < 5
    check(run, run.figures.requests)
    assert run.figures.requests > 2000


# --- nodes and starts


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=40)
def test_nodes_are_chosen_as_by_the_platform(seed: int) -> None:
    draw = random.Random(seed)
    cluster = SimulatedCluster(8, 3, host_images=2, host_ttl_s=50.0)
    running: list[tuple[int, int]] = []
    for step in range(60):
        now_s, function = float(step), draw.randrange(3)
        if running and draw.random() < 0.5:
            ended = running.pop(draw.randrange(len(running)))
            cluster.release(*ended, now_s, loaded=draw.random() < 0.9)
        else:
            chosen = cluster.choose(function, 8, now_s)
            ranks = {StartTier.HOT: 0, StartTier.WARM: 1, StartTier.COLD: 4}
            candidates = [
                StartCandidate(id=f"{n:02}", host=f"{n:02}", rank=ranks[tier], free_bytes=1, instances=0)
                for n, tier in chosen
            ]
            draw.shuffle(candidates)
            assert [int(one.id) for one in choose_starts(8, candidates)] == [node for node, _ in chosen]
            assert len(chosen) == cluster.free
            near = [tier for _, tier in chosen]
            assert (near.count(StartTier.HOT), near.count(StartTier.WARM)) == cluster.near(function, now_s)
            if chosen:
                node = chosen[0][0]
                cluster.occupy(function, node, now_s)
                running.append((function, node))
        cluster.check_integrity(running)
    cluster.finish(100.0)
    assert cluster.copy_s >= 3 * 100.0 * 0.99  # at least the copies that are kept


def test_casts_last_as_long_as_their_planners_predict() -> None:
    copy_s, start_s = PROFILE.image_bytes / PROFILE.links.network, 0.05
    times = {name: StartTimes(PROFILE, MODES[name], Overheads(start_s=start_s)) for name in SCALED}
    for targets in (1, 3, 7, 100):
        ours, tree = times["hypercast"].cold_s(1, targets), times["faasnet"].cold_s(1, targets)
        assert len(ours) == targets and list(ours) == sorted(ours)
        assert start_s + copy_s <= ours[-1] <= start_s + 1.5 * copy_s
        assert ours[-1] <= times["nccl"].cold_s(1, targets)[-1] and (targets < 3 or ours[-1] < tree[-1])
        assert set(times["ideal"].cold_s(1, targets)) == {start_s}
    assert times["serverlessllm"].cold_s(1, 2)[1] == pytest.approx(start_s + PROFILE.image_bytes / 5e9)
    assert times["hypercast"].cold_s(0, 2)[0] == pytest.approx(times["serverlessllm"].next_cold_s(0))


# --- requests


def test_a_day_has_its_rate_and_its_hours() -> None:
    trace = [TraceRequest(float(at), 10 + at, 5) for at in range(600)]
    day = DayTrace.of(trace, 4096)
    found = list(day.arrivals(function=0, rate=3.3, hours=24, seed=5))
    assert len(found) == pytest.approx(3.3 * 86400, rel=0.02)
    assert [one.offset_s for one in found] == sorted(one.offset_s for one in found)
    by_hour = [0] * 24
    for one in found:
        by_hour[int(one.offset_s / 3600)] += 1
    assert max(by_hour) > 3 * min(by_hour)
    assert sum(daily_factor(3600 * hour) for hour in range(24)) == pytest.approx(24)
    assert sum(zipf_weights(50)) == pytest.approx(1)


# --- the command


def test_records_have_the_fields_of_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = ["--half", "first", "--minutes", "0.5", "--nodes", "4", "--speedup", "1", "--functions", "2"]
    main([*options, "--mode", "hypercast,fixed-half", "--json", str(file)])
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == ["hypercast", "fixed-half"] and "run" in rows[0]
    for row in rows:
        assert row["is_simulated"] and row["failed"] == 0 and row["requests"] > 50 and row["gpu_s"] > 10
        assert row["ttft_p50_s"] <= row["ttft_p90_s"] <= row["ttft_p99_s"] and row["tbt_p50_s"] > 0
        assert row["host_byte_s"] > 0 and row["instances"][0][0] == 0 and row["params"]["nodes"] == 4
    with pytest.raises(SystemExit):
        main(["--trace", str(tmp_path / "none.csv")])


def measured_record(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "ideal",
        "params": params,
        "gpu_s": 10.0,
        "gpu_loading_s": 1.0,
        "gpu_busy_s": 6.0,
        "client_late_p99_s": 0.001,
        "processor_share": 0.5,
        "failed": 0,
    }


def test_measured_settings_are_simulated(tmp_path: Path) -> None:
    args = parse(["--half", "first", "--minutes", "0.5", "--nodes", "6", "--slower", "2", "--tail", "3"])
    measured_file, file = tmp_path / "measured.json", tmp_path / "compared.json"
    params = params_of(args, scenario_of(args)[0], TRACE_MODES["ideal"])
    measured_file.write_text(json.dumps([measured_record(params) | {"starts": {"warm": 1}}]))
    main(["--against", str(measured_file), "--json", str(file)])
    (row,) = json.loads(file.read_text())
    assert row["name"] == "ideal" and row["gpu_s_ratio"] == pytest.approx(row["gpu_s"] / 10, rel=1e-3)
    assert [row["params"][name] for name in ("nodes", "slower", "speedup", "tail")] == [6, 2, 4.0, 3.0]
    assert row["params"]["emulated"] == "h800-llama2-13b" and row["requests"] == len(
        scenario_of(args)[0].arrivals
    )
    by_cause = row["gpu_s_difference"]
    assert by_cause["busy"] == pytest.approx(row["gpu_busy_s"] - 6)
    assert sum(by_cause.values()) == pytest.approx(row["gpu_s"] - 10, abs=0.01)
    assert row["measured_starts"] == {"warm": 1}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"client_late_p99_s": 0.010}, "the client was 10 ms late"),
        ({"processor_share": 0.7}, "processors were 70% busy"),
        ({"failed": 2}, "2 requests failed"),
        ({"ledger_ok": False}, "the ledger is not exact"),
    ],
)
def test_a_measured_run_that_does_not_count_is_refused(
    fault: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(["--half", "first", "--minutes", "0.1", "--nodes", "2"])
    params = params_of(args, scenario_of(args)[0], TRACE_MODES["ideal"])
    path = tmp_path / "measured.json"
    path.write_text(json.dumps([measured_record(params) | fault]))
    with pytest.raises(SystemExit):
        main(["--against", str(path)])
    assert words in capsys.readouterr().err
    main(["--against", str(path), "--anyway"])


def test_the_kv_cache_of_a_scaled_run_is_simulated(tmp_path: Path) -> None:
    args = parse(["--minutes", "0.1", "--nodes", "2", "--emulated", "h800-llama2-13b/4000"])
    scenario = scenario_of(args)[0]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps([measured_record(params_of(args, scenario, TRACE_MODES["ideal"]))]))
    page_bytes = 40 * 2 * 4 * 16  # 40 layers, K and V, an item of 4 bytes, 16 tokens
    pages = (scenario.arena_bytes - scenario.image_bytes) // 2 // page_bytes
    (run,) = measured(path)
    assert int(dict(run.options)["--kv-tokens"]) == pytest.approx(16 * pages, abs=16)


def test_copies_in_host_memory_at_first_are_not_simulated(tmp_path: Path) -> None:
    args = parse(["--half", "first", "--minutes", "0.1", "--nodes", "2", "--holders", "mixed"])
    params = params_of(args, scenario_of(args)[0], TRACE_MODES["ideal"])
    path = tmp_path / "measured.json"
    path.write_text(json.dumps([measured_record(params)]))
    with pytest.raises(ValueError, match="copies in host memory"):
        measured(path)


def test_settings_that_earlier_records_lack_are_simulated_by_default(tmp_path: Path) -> None:
    scaling = ("--min-instances", "0", "--scale-down-delay", "2")
    args = parse(["--half", "first", "--minutes", "0.1", "--host-models", "2", *scaling])
    params = params_of(args, scenario_of(args)[0], TRACE_MODES["hypercast"])
    path = tmp_path / "measured.json"
    new = {"min_instances", "host_models", "holders", "keep_alive"}
    earlier = {key: value for key, value in params.items() if key not in new}
    rows = [measured_record(params), measured_record(earlier)]
    path.write_text(json.dumps([{**row, "name": "hypercast"} for row in rows]))
    now, before = (dict(run.options) for run in measured(path))
    assert (now["--min-instances"], now["--host-images"]) == ("0", "2")
    assert before.keys() == now.keys() - {"--min-instances", "--host-images"}
    assert before["--keep-alive"] == now["--keep-alive"] == "2.0" == now["--scale-down-delay"]
    path.write_text(json.dumps([{**rows[0], "params": {**params, "scale_down_delay": None}}]))
    assert "--scale-down-delay" not in dict(measured(path)[0].options)


def test_gpu_time_ends_with_the_window_though_calls_go_on() -> None:
    late = [TraceRequest(0.0, 100, 3000)]
    done = simulate(settings_for(nodes=2, min_instances=1), [iter(late)], 5.0)
    assert done.figures.requests == 1 and done.figures.open_calls == 0
    assert done.figures.gpu_s == pytest.approx(5.0) == done.figures.integral_s
    assert done.cluster.copy_s == pytest.approx(5.0)
    assert done.figures.loading_s == 0 and done.figures.busy_s == pytest.approx(5.0)


def test_an_ended_instance_leaves_no_image_on_the_accelerator_by_default() -> None:
    cluster = SimulatedCluster(2, 1, host_images=1, host_ttl_s=50.0)
    cluster.occupy(0, 0, 0.0)
    cluster.release(0, 0, 1.0, loaded=True)
    assert cluster.choose(0, 1, 2.0) == [(0, StartTier.WARM)]


def test_without_copies_an_image_leaves_its_host_with_the_instance() -> None:
    cluster = SimulatedCluster(2, 1, host_images=1, host_ttl_s=50.0, keeps_copies=False)
    assert cluster.sources(0, 0.0) == 0
    cluster.occupy(0, 1, 0.0)
    assert cluster.sources(0, 1.0) == 1 and cluster.choose(0, 1, 1.0) == [(0, StartTier.COLD)]
    cluster.release(0, 1, 2.0, loaded=True)
    cluster.check_integrity([])
    assert cluster.sources(0, 2.0) == 0 and cluster.choose(0, 1, 2.0) == [(0, StartTier.COLD)]
    assert cluster.copy_s == 2.0


def test_from_zero_only_what_is_in_memory_starts_quickly() -> None:
    apart = [TraceRequest(60.0 * number, 100, 10) for number in range(5)]
    loading_s = {
        mode: simulate(
            settings_for(mode, min_instances=0, keep_alive_s=1.0), [iter(apart)], 300.0
        ).figures.loading_s
        for mode in ("hypercast", "faasnet", "faasnet-copies")
    }
    assert loading_s["faasnet"] > 5 * PROFILE.image_bytes / PROFILE.links.disk
    assert loading_s["hypercast"] == loading_s["faasnet-copies"] < loading_s["faasnet"] / 5
