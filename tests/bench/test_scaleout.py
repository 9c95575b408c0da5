"""The pure parts of the measurement of scaling out, and its platform's places."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.harness.event_stream import event_of
from benchmarks.scaleout import command as scaleout
from benchmarks.scaleout.client import Burst, BurstAnswer, prompt_of, token_error
from benchmarks.scaleout.modes import COMPARED, EMULATED_ONLY, MODES, TURNS
from benchmarks.scaleout.plot import plot
from benchmarks.scaleout.records import (
    STEP_S,
    WINDOW_S,
    BurstRequest,
    BurstRun,
    TokenRate,
    compare,
    first_token_of,
    rate_of,
    record_of,
    requests_of,
    show,
)
from benchmarks.scaleout.scenarios import link_bytes_s, scenarios
from gateway.core.fixed_plan import parse_fixed_plan
from invoker.emulated.profiles import DEVICES
from invoker.emulated.tokens import continuation
from registry.messages.sampling import Sampling
from registry.records.function import Scaling
from registry.records.live import LiveMode

STAIRS = [
    {
        "from_s": 0.2,
        "to_s": 0.4,
        "pipelines": 2,
        "instances": 0,
        "tokens_per_s": 900.0,
        "predicted_tokens_per_s": 1000.0,
        "of_predicted": 0.9,
        "prompts": 4,
        "predicted_prompts": 3,
    }
]


def answer(*arrived_s: float, kind: str = "hot", failure: str = "") -> BurstAnswer:
    return BurstAnswer(
        arrived_s=list(arrived_s), tokens=[1] * len(arrived_s), start_kind=kind, failure=failure
    )


def steady(begin_s: float, per_s: float, seconds: float, kind: str = "hot") -> BurstRequest:
    count = int(per_s * seconds)
    arrived_s = tuple(begin_s + (at + 1) / per_s for at in range(count))
    return BurstRequest(arrived_s=arrived_s, tokens=(1,) * count, start_kind=kind)


def test_every_mode_is_one_that_the_platform_can_be_told() -> None:
    assert list(COMPARED) == [
        *("hypercast", "stop-the-world", "faasnet", "nccl", "gloo"),
        *("serverlessllm-ssd", "serverlessllm-memory", "blitzscale"),
    ]
    assert {*COMPARED, *TURNS, "serverlessllm-mixed"} == set(MODES) and set(EMULATED_ONLY) <= set(MODES)
    for mode in MODES.values():
        assert {mode.source_device, mode.target_device} <= set(DEVICES)
        assert not (mode.planner and mode.own_copies)
        Scaling(live=LiveMode(mode.live))
        if mode.planner:
            parse_fixed_plan(mode.planner)


def test_times_are_the_models() -> None:
    (request,) = requests_of([answer(5.0, 7.0, kind="cold")], slower=10)
    assert request.arrived_s == (0.5, 0.7) and request.ttft_s == 0.5
    with pytest.raises(ValueError, match="1 of 2 requests failed, the first: lost"):
        requests_of([answer(1.0), answer(failure="lost")], slower=1)


def test_the_rate_is_that_of_the_last_moments() -> None:
    rate = rate_of([steady(0.0, 100.0, 2.0), steady(1.0, 100.0, 1.0)])
    assert rate.per_s[int(0.9 / STEP_S)] == pytest.approx(100, abs=1.5 / WINDOW_S)
    assert rate.peak == pytest.approx(200, abs=2.5 / WINDOW_S)
    assert rate.half_peak_s <= 0.3
    late = rate_of([steady(1.5, 50.0, 1.0)])
    assert late.per_s[0] == 0 and 1.5 < late.half_peak_s < 1.8


def test_half_of_the_peak_is_told_between_two_steps() -> None:
    assert TokenRate(per_s=(0.0, 50.0, 150.0, 200.0)).half_peak_s == pytest.approx(1.5 * STEP_S)
    assert TokenRate(per_s=(0.0, 100.0, 200.0)).half_peak_s == pytest.approx(STEP_S)
    assert TokenRate(per_s=(100.0, 100.0)).half_peak_s == 0.0


def test_half_of_the_peak_is_held_once_the_rate_falls_below_it_no_more() -> None:
    dips = TokenRate(per_s=(0.0, 100.0, 120.0, 50.0, 150.0, 200.0, 60.0, 200.0))
    assert dips.half_peak_s == pytest.approx(STEP_S)
    assert dips.held_half_peak_s == pytest.approx(3.5 * STEP_S)
    assert TokenRate(per_s=(0.0, 50.0, 150.0, 200.0)).held_half_peak_s == pytest.approx(1.5 * STEP_S)
    assert TokenRate(per_s=(100.0, 200.0)).held_half_peak_s == 0.0
    assert dips.made(3 * STEP_S) == pytest.approx(220 * STEP_S)


def test_first_tokens_are_named_by_where_they_came_from() -> None:
    waits = [steady(0.4, 10, 1, "warm"), steady(0.9, 10, 1, "cold"), steady(0.6, 10, 1, "live")]
    assert first_token_of(waits, "live", "cold") == pytest.approx(0.7)
    assert first_token_of(waits, "cold") == pytest.approx(1.0)
    assert first_token_of(waits, "hot") is None


def test_records_are_made_and_drawn(tmp_path: Path) -> None:
    args = scaleout.parse(["--nodes", "4", "--requests", "2"])
    (scenario,) = scenarios(args, tmp_path)
    runs = [
        BurstRun(requests=[steady(0.5, 20, 2, "cold"), steady(0.1, 20, 2)], stairs=STAIRS),
        BurstRun(requests=[steady(0.6, 20, 2, "cold"), steady(0.1, 20, 2)], stairs=STAIRS),
    ]
    limits = scaleout.limits_of(args, scenario)
    rows = [
        record_of(name, runs, limits, scaleout.params_of(args, scenario, MODES[name]))
        for name in ("stop-the-world", "nccl")
    ]
    row = json.loads(json.dumps(rows[0]))
    assert row["emulated"] is True and "emulated 1x H800" in row["params"]["emulated"]
    assert row["ttft_p50_s"] == pytest.approx(0.15) and row["ttft_p90_s"] == pytest.approx(0.65)
    assert row["first_of_loading_s"] in (pytest.approx(0.55), pytest.approx(0.65))
    assert row["first_live_s"] is None and row["first_live_of_transfer"] is None
    assert row["transfer_s"] == pytest.approx(26.03e9 / 50e9, rel=0.01)
    assert row["limit_s"] == pytest.approx(26.03e9 / 50e9 + 0.025, rel=0.01)
    assert row["start_kinds"] == {"cold": 2, "hot": 2}
    assert "emulated k=1 in host" in show(row)
    assert "2 pipelines, 0 instances: 900 tokens/s of 1000 predicted by the profile: 0.90" in show(row)
    assert "; 4 first tokens of 3" in show(row)
    assert row["least_of_predicted"] == 0.9
    assert compare([]) == [], "a run that fails at once must not be hidden by its comparison"
    (line,) = compare(rows)
    assert "vs nccl: emulated P90 TTFT 1.00 times sooner, half of its peak after 1.00 of the time" in line
    assert "sustained after 1.00; at " in line and row["held_half_peak_s"] >= row["half_peak_s"]
    plot(rows, tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_the_scene_is_what_is_asked_for(tmp_path: Path) -> None:
    options = ["--emulated", "h800-llama2-70b/10000", "--sources", "1,2", "--holders", "gpu,host"]
    args = scaleout.parse([*options, "--nodes", "2"])
    found = scenarios(args, tmp_path)
    places = [(scenario.holders, scenario.sources) for scenario in found]
    assert places == [("gpu", 1), ("host", 1), ("host", 2)]  # two that serve already: nobody starts
    ssd = MODES["serverlessllm-ssd"]
    assert found[0].source_device(ssd) == "emulated:h800x4/10000/10"
    assert found[1].source_device(ssd) == "emulated:h800-diskx4/10000/10"
    assert found[1].source_device(MODES["serverlessllm-mixed"]) == "emulated:h800x4/10000/10"
    assert found[0].target_device(ssd) == "emulated:h800-diskx4/10000/10"
    assert found[0].bundle.architecture == "emulated:llama2-70b/10000" == found[0].burst.emulated
    assert found[0].slower == 10 and found[0].own_copy_s == pytest.approx(10 * 137.95e9 / 64e9, rel=0.01)


def test_of_mixed_holders_the_first_half_serves(tmp_path: Path) -> None:
    found = scenarios(scaleout.parse(["--sources", "1,2,5", "--holders", "mixed,gpu,host"]), tmp_path)
    serving = {(scenario.holders, scenario.sources): scenario.serving for scenario in found}
    assert serving == {
        ("mixed", 2): 1,
        ("mixed", 5): 2,
        **{("gpu", count): count for count in (1, 2, 5)},
        **{("host", count): 0 for count in (1, 2, 5)},
    }


def test_with_the_real_engine_nothing_is_scaled() -> None:
    args = scaleout.parse(["--real", "2", "--rate", "100mbit", "--slower", "20"])
    assert args.slower == 1 and "serverlessllm-ssd" not in args.modes and "gloo" in args.modes
    assert link_bytes_s(args) == 12_500_000


@pytest.mark.parametrize(
    "argv",
    [
        ["--emulated", "h100"],
        ["--nodes", "2", "--sources", "3"],
        ["--nodes", "2", "--sources", "2", "--holders", "gpu"],
        ["--sources", "1", "--holders", "mixed"],
        ["--modes", "magic"],
        ["--real", "2", "--modes", "serverlessllm-ssd"],
    ],
)
def test_what_makes_no_sense_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        scaleout.parse(argv)


def test_prompts_differ_and_wrong_tokens_are_found() -> None:
    assert len(prompt_of(3, 512, 32_000)) == 512
    assert prompt_of(3, 512, 32_000) != prompt_of(4, 512, 32_000)
    assert max(prompt_of(49, 4000, 32_000)) < 32_000 and max(prompt_of(49, 4000, 500)) < 500
    assert event_of('data: {"a": 1}') == {"a": 1}
    assert event_of("data: [DONE]") == event_of(": stage=load 62%") == event_of("") == {}
    burst = Burst(
        model="f",
        emulated="emulated:llama2-13b/1000",
        vocabulary=32_000,
        requests=1,
        prompt_tokens=4,
        output_tokens=3,
        timeout_s=1.0,
    )
    prompt = prompt_of(0, 4, burst.vocabulary)
    expected = continuation(prompt, 3, burst.vocabulary, Sampling(max_tokens=3, temperature=0.0))
    assert token_error(burst, prompt, expected) == ""
    assert (
        token_error(burst, prompt, [*expected[:2], expected[2] ^ 1]) == "the tokens differ from the model's"
    )
    assert token_error(burst, prompt, expected[:2]) == "received 2 tokens, not 3"
    assert token_error(replace(burst, emulated=""), prompt, [1, 2, 3]) == ""


def test_a_model_that_does_not_fit_into_memory_is_refused_with_the_remedy() -> None:
    free = 11 << 30
    whole = scaleout.parse(["--emulated", "h800-llama2-13b", "--nodes", "2", "--modes", "hypercast"])
    message = scaleout.memory_shortfall(whole, free, free)
    assert message.startswith(
        "--emulated h800-llama2-13b needs 24.2 GiB of shared memory (1 x 24.2 GiB), 11.0 GiB"
    )
    assert "use --emulated h800-llama2-13b/1000" in message
    assert "needs 72.7 GiB of memory (3 x 24.2 GiB)" in scaleout.memory_shortfall(whole, 30 << 30, 30 << 30)
    assert scaleout.memory_shortfall(whole, 30 << 30, 80 << 30) == ""
    own_copies = scaleout.parse(
        ["--emulated", "h800-llama2-13b", "--nodes", "2", "--modes", "serverlessllm-memory"]
    )
    assert "(2 x 24.2 GiB)" in scaleout.memory_shortfall(own_copies, free, free)
    scaled = scaleout.parse(["--emulated", "h800-llama2-13b/1000"])
    assert scaleout.memory_shortfall(scaled, free, free) == ""
    assert "use fewer layers" in scaleout.memory_shortfall(scaleout.parse(["--real", "1000"]), free, free)
