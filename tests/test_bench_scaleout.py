"""The pure parts of the measurement of scaling out, and its platform's places."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaleout
from benchmarks.scaleout_client import event_of, prompt_of
from benchmarks.scaleout_modes import MODES
from benchmarks.scaleout_records import (
    STEP_S,
    Request,
    first_of_loading,
    plot,
    rate_of,
    record_of,
    requests_of,
    show,
)
from gateway.fixed_plan import parse_fixed_plan
from invoker.emulated.profiles import DEVICES
from registry.function import Scaling
from registry.live import Live


def answer(*arrived_s: float, kind: str = "hot", failure: str = "") -> dict[str, Any]:
    return {
        "arrived_s": list(arrived_s),
        "tokens": [1] * len(arrived_s),
        "start_kind": kind,
        "failure": failure,
    }


def steady(begin_s: float, per_s: float, seconds: float, kind: str = "hot") -> Request:
    count = int(per_s * seconds)
    arrived_s = tuple(begin_s + (at + 1) / per_s for at in range(count))
    return Request(arrived_s=arrived_s, tokens=(1,) * count, start_kind=kind)


def test_every_mode_is_one_that_the_platform_can_be_told() -> None:
    assert list(MODES) == [
        *("hypercast", "stop-the-world", "faasnet", "nccl"),
        *("serverlessllm-ssd", "serverlessllm-memory", "blitzscale"),
    ]
    for mode in MODES.values():
        assert mode.target_device in DEVICES
        assert not (mode.planner and mode.own_copies)
        Scaling(live=Live(mode.live))
        if mode.planner:
            parse_fixed_plan(mode.planner)


def test_times_are_the_models() -> None:
    (request,) = requests_of([answer(5.0, 7.0, kind="cold")], slower=10)
    assert request.arrived_s == (0.5, 0.7) and request.ttft_s == 0.5
    with pytest.raises(ValueError, match="1 of 2 requests failed, the first: lost"):
        requests_of([answer(1.0), answer(failure="lost")], slower=1)


def test_the_rate_is_that_of_the_last_moments() -> None:
    rate = rate_of([steady(0.0, 100.0, 2.0), steady(1.0, 100.0, 1.0)])
    assert rate.per_s[int(0.9 / STEP_S)] == pytest.approx(100, abs=8)
    assert rate.peak == pytest.approx(200, abs=8)
    assert rate.half_peak_s <= 0.3
    late = rate_of([steady(1.5, 50.0, 1.0)])
    assert late.per_s[0] == 0 and 1.5 < late.half_peak_s < 1.8


def test_a_holder_that_loads_from_its_own_memory_is_no_loading_node() -> None:
    waits = [steady(0.4, 10, 1, "warm"), steady(0.9, 10, 1, "cold"), steady(0.6, 10, 1, "live")]
    assert first_of_loading(waits) == pytest.approx(0.7)
    assert first_of_loading([steady(0.1, 10, 1), steady(0.1, 10, 1, "warm")]) is None


def test_records_and_their_picture(tmp_path: Path) -> None:
    args = scaleout.parse(["--nodes", "4", "--requests", "2"])
    (scene,) = scaleout.scenes(args)
    runs = [
        [steady(0.5, 20, 2, "cold"), steady(0.1, 20, 2)],
        [steady(0.6, 20, 2, "cold"), steady(0.1, 20, 2)],
    ]
    rows = [
        record_of(name, runs, scaleout.limit_of(args), scaleout.params_of(args, scene, MODES[name]))
        for name in ("stop-the-world", "nccl")
    ]
    row = json.loads(json.dumps(rows[0]))
    assert row["emulated"] is True and "emulated 1x H800" in row["params"]["emulated"]
    assert row["ttft_p50_s"] == pytest.approx(0.15) and row["ttft_p90_s"] == pytest.approx(0.65)
    assert row["first_of_loading_s"] == pytest.approx(0.55)
    assert row["limit_s"] == pytest.approx(26.03e9 / 50e9 + 0.025, rel=0.01)
    assert row["start_kinds"] == {"cold": 2, "hot": 2}
    assert "emulated k=1 in host" in show(row)
    plot(rows, tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_the_scene_is_what_is_asked_for() -> None:
    args = scaleout.parse(
        ["--emulated", "h800-llama2-70b/10000", "--sources", "1,2", "--holders", "gpu,host", "--nodes", "2"]
    )
    found = scaleout.scenes(args)
    assert [(scene.holders, scene.sources) for scene in found] == [("gpu", 1), ("host", 1)]
    assert str(found[0].device) == "emulated:h800x4/10000/10"
    assert found[0].bundle.architecture == "emulated:llama2-70b/10000" == found[0].burst.architecture


@pytest.mark.parametrize(
    "argv", [["--emulated", "h100"], ["--nodes", "2", "--sources", "2"], ["--modes", "magic"]]
)
def test_what_makes_no_sense_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        scaleout.parse(argv)


def test_prompts_and_events() -> None:
    assert len(prompt_of(3, 512)) == 512 and prompt_of(3, 512) != prompt_of(4, 512)
    assert max(prompt_of(49, 4000)) < 32_000
    assert event_of('data: {"a": 1}') == {"a": 1}
    assert event_of("data: [DONE]") == event_of(": stage=load 62%") == event_of("") == {}
