"""What pipelines would serve by the profile alone, and how measurements are held against it."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from benchmarks.scaleout.client import Burst
from benchmarks.scaleout.predicted import predicted, stairs
from benchmarks.scaleout.profiles import find_profile
from benchmarks.scaleout.records import TokenArrival
from benchmarks.scaleout.watch import ServingReplica, ServingSet
from invoker.emulated.profiles import StepLoad

PROFILE = find_profile("h800-llama2-13b/1000")
BURST = Burst(
    model="f",
    emulated="",
    vocabulary=PROFILE.model.vocabulary,
    requests=8,
    prompt_tokens=512,
    output_tokens=64,
    timeout_s=1.0,
)
LAYERS = PROFILE.model.layers


def pipeline(name: str, *nodes: str) -> ServingReplica:
    part = LAYERS // len(nodes)
    stages = tuple((node, place * part, (place + 1) * part) for place, node in enumerate(nodes))
    return ServingReplica(name=name, rate=len(nodes) / (1 + 0.05 * len(nodes)), stages=stages)


def serving(at_s: float, *pipelines: ServingReplica, ready: tuple[str, ...] = ()) -> ServingSet:
    return ServingSet(at_s=at_s, pipelines=pipelines, ready=ready)


def tokens(arrivals: list[TokenArrival]) -> int:
    return sum(one.tokens for one in arrivals)


def test_an_instance_serves_as_the_profile_says() -> None:
    one = replace(BURST, requests=1, output_tokens=2)
    arrivals = predicted(PROFILE, one, [serving(0.0, ready=("n0",))], 10.0)
    first_s = PROFILE.step_s(StepLoad(tokens=512, sequences=1))
    assert arrivals[0][0] == pytest.approx(first_s)
    assert tokens(arrivals) == 2 and arrivals[1][0] == pytest.approx(
        first_s + PROFILE.step_s(StepLoad(tokens=1, sequences=1, context=512))
    )


def test_all_tokens_come_once_whatever_serves() -> None:
    four, two = pipeline("a.0", "n0", "n1", "n2", "n3"), pipeline("b.0", "n4", "n5")
    seen = [serving(0.0), serving(0.1, four), serving(0.2, four, two), serving(0.3, two), serving(0.4, four)]
    arrivals = predicted(PROFILE, BURST, seen, 60.0)
    assert tokens(arrivals) == BURST.requests * BURST.output_tokens
    assert sum(one.first for one in arrivals) == BURST.requests
    assert arrivals[0].at_s > 0.1 and arrivals == sorted(arrivals)


def test_a_pipeline_of_more_nodes_serves_more() -> None:
    ends = [
        predicted(PROFILE, BURST, [serving(0.0, pipeline("a.0", *nodes))], 60.0)[-1][0]
        for nodes in (("n0", "n1"), ("n0", "n1", "n2", "n3"))
    ]
    assert ends[1] < ends[0]


def test_stairs_hold_what_came_against_it() -> None:
    four, more = pipeline("a.0", "n0", "n1", "n2", "n3"), pipeline("b.0", "n4", "n5", "n6", "n7")
    seen = [serving(0.0), serving(0.1, four), serving(0.3, four, more), serving(0.9, ready=("n2",))]
    arrivals = predicted(PROFILE, BURST, seen, 0.9)
    found = stairs(PROFILE, BURST, seen, arrivals)
    assert [(stair["from_s"], stair["to_s"], stair["pipelines"]) for stair in found] == [
        (0.1, 0.3, 1),
        (0.3, 0.9, 2),
    ]
    assert {stair["of_predicted"] for stair in found} == {1.0}
    assert [stair["prompts"] for stair in found] == [stair["predicted_prompts"] for stair in found]
    assert sum(stair["prompts"] for stair in found) == BURST.requests
    late, later = ([one._replace(at_s=one.at_s + by_s) for one in arrivals] for by_s in (0.1, 0.2))
    assert stairs(PROFILE, BURST, seen, late)[0]["of_predicted"] < 0.8
    assert stairs(PROFILE, BURST, seen, later)[0]["prompts"] < BURST.requests


def test_a_member_that_is_whole_takes_its_share() -> None:
    two, ready = pipeline("a.0", "n0", "n1"), ("n0",)
    switched = [serving(0.0, two), serving(0.2, two, ready=ready), serving(0.4, ready=ready)]
    arrivals = predicted(PROFILE, BURST, switched, 60.0)
    assert tokens(arrivals) == BURST.requests * BURST.output_tokens
    after = [0.4, *(one.at_s for one in arrivals if one.at_s > 0.4)]
    # Half of the calls are there already, and go on while the prompts of the others are run.
    assert max(b - a for a, b in pairwise(after)) < 1.2 * PROFILE.step_s(StepLoad(tokens=512, sequences=1))
    found = stairs(PROFILE, BURST, switched, arrivals)
    assert [(stair["pipelines"], stair["instances"]) for stair in found] == [(1, 0), (1, 1)]


def test_a_member_that_is_whole_has_less_time_for_its_stage() -> None:
    two = pipeline("a.0", "n0", "n1")
    member_s, other_s = (
        predicted(PROFILE, BURST, [serving(0.0, two, ready=(node,))], 60.0)[-1][0] for node in ("n0", "n2")
    )
    assert member_s > other_s


def test_without_pipelines_there_are_no_stairs() -> None:
    assert (
        stairs(PROFILE, BURST, [serving(0.0), serving(0.5, ready=("n0",))], [TokenArrival(0.6, 1, 1)]) == []
    )
