"""How the modes of a trace run configure the platform."""

import pytest

from benchmarks.harness.rival_nodes import FREE_DEVICE
from benchmarks.trace import command
from benchmarks.trace.modes import COMPARED, MODES
from benchmarks.trace.scenario import TraceScenario, params_of, scenario_of
from benchmarks.trace.synthetic import SYNTHETIC
from gateway.core.fixed_plan import parse_fixed_plan
from invoker.emulated.profiles import DEVICES
from registry.records.function import ScaleDown, Scaling, ScalingMode, ServingMode
from registry.records.live import LiveMode


def small_scenario(*options: str) -> TraceScenario:
    small = ("--emulated", "h800-llama2-7b/10000", "--minutes", "1")
    return scenario_of(command.parse([*small, *options]))[0]


def test_every_mode_configures_the_platform() -> None:
    assert list(COMPARED) == [
        *("hypercast", "serverlessllm", "serverlessllm-allcache", "faasnet", "nccl", "blitzscale"),
        *("fixed-full", "fixed-half", "ideal"),
    ]
    scenario, _ = scenario_of(command.parse(["--minutes", "1", "--slower", "2"]))
    for mode in MODES.values():
        assert mode.device in {*DEVICES, FREE_DEVICE}
        # What casts have neither the model at once nor a copy that is kept has a disk to fall back on.
        assert mode.own_disk or mode.keeps_copies
        assert mode.description and (mode.share is None or mode.cached)
        if mode.planner:
            parse_fixed_plan(mode.planner)
        settings = scenario.scaling(mode)
        names = {"live": LiveMode, "policy": ScalingMode, "serving": ServingMode, "scale_down": ScaleDown}
        Scaling(**{name: names.get(name, type(value))(value) for name, value in settings.items()})
    assert MODES["fixed-half"].instances(8) == 4 and MODES["hypercast"].instances(8) is None
    assert scenario.scaling(MODES["hypercast"])["ttft_target_s"] == 2.0
    for delay, expected in (((), ("start", None)), (("--scale-down-delay", "2"), ("delay", 4.0))):
        scenario, _ = scenario_of(command.parse(["--minutes", "1", "--slower", "2", *delay]))
        each = [scenario.scaling(mode) for mode in MODES.values()]
        assert {(one["scale_down"], one.get("scale_down_delay_s")) for one in each} == {expected}


def test_functions_have_different_models_of_one_size() -> None:
    scenario = small_scenario("--functions", "3", "--host-models", "2")
    images = {bundle.image for bundle in scenario.bundles}
    assert len(images) == 3 and {bundle.image_bytes for bundle in scenario.bundles} == {scenario.image_bytes}
    assert {one.function for one in scenario.arrivals} == {0, 1, 2}
    assert scenario.host_models(MODES["hypercast"]) == 2
    assert scenario.host_models(MODES["serverlessllm-allcache"]) == 3  # its advantage
    need = command.memory_need(scenario, [MODES["hypercast"], MODES["ideal"]])
    assert need.host_copies == 3 * scenario.nodes


def test_fixed_instances_are_shared_by_the_functions_requests() -> None:
    scenario = small_scenario("--functions", "3", "--nodes", "8")
    assert [scenario.fixed(MODES["fixed-full"], place) for place in range(3)] == [4, 2, 1]
    assert [scenario.fixed(MODES["fixed-half"], place) for place in range(3)] == [2, 1, 1]
    assert scenario.fixed(MODES["hypercast"], 0) is None
    assert scenario.slots == 2 and not scenario.excess(MODES["fixed-full"])
    small = small_scenario("--functions", "4", "--nodes", "1")
    assert "fixed-half has 4 instances of 4 functions, but nodes hold 2" in small.excess(MODES["fixed-half"])
    assert not small.excess(MODES["hypercast"])


@pytest.mark.parametrize(
    ("options", "instances", "copies"),
    [
        ((), [1, 1], [0, 0]),
        (("--min-instances", "0"), [1, 0], [0, 1]),
        (("--holders", "mixed"), [1, 1], [2, 2]),
        (("--holders", "mixed", "--min-instances", "0"), [1, 0], [2, 2]),
        (("--holders", "host"), [0, 0], [1, 1]),
    ],
)
def test_models_are_at_first_where_they_are_to_be(
    options: tuple[str, ...], instances: list[int], copies: list[int]
) -> None:
    scenario = small_scenario("--functions", "2", *options)
    mode = MODES["hypercast"]
    assert [scenario.at_first(mode, place) for place in range(2)] == instances
    assert [scenario.scaling(mode, place)["min_instances"] for place in range(2)] == instances
    assert [scenario.provisioning.copies(place) for place in range(2)] == copies


def test_models_in_host_memory_alone_have_no_instances() -> None:
    with pytest.raises(SystemExit):
        command.parse(["--holders", "host", "--min-instances", "1"])


@pytest.mark.parametrize(
    "argv", [["--trace", "nothing.csv"], ["--start", "3600"], ["--half", "first", "--start", "1790"]]
)
def test_what_the_trace_does_not_have_is_refused(argv: list[str]) -> None:
    with pytest.raises((ValueError, OSError)):
        scenario_of(command.parse(argv))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_traces_are_labelled(name: str) -> None:
    args = command.parse(["--trace", name, "--minutes", "1"])
    scenario, _ = scenario_of(args)
    assert params_of(args, scenario, MODES["ideal"])["trace"].startswith("synthetic")
