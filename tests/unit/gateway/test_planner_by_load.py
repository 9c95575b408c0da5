"""The planner where the load decides: idle spells, room for others, paused instances, failures. Pure."""

from dataclasses import replace

import pytest

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.actions import StartAction, StopAction
from gateway.planning.demand_sum import DemandSum
from gateway.planning.load_target import PolicyBySetting
from gateway.planning.plan import Plan, VersionDemand
from gateway.planning.planner import ScalingPlanner
from gateway.planning.policy import FunctionLoad, PolicyState, ScalingDecision
from gateway.planning.work import TokenLoad
from registry.messages.node import InstanceLoad
from registry.records.change import (
    FunctionChanged,
    InstanceChanged,
    NodeUp,
    ScaleRequested,
    ScaleTarget,
    VersionLoad,
)
from registry.records.function import Function, Scaling, ScalingMode
from registry.records.instance import InstanceState
from registry.records.node import Tier
from tests.fixtures.control import MIB, make_holding, make_instance, make_node, make_version

PROMPT, RATE = 1000, 8000.0


class FragilePolicy(PolicyBySetting):
    """A policy that fails on functions with a target concurrency of seven."""

    def decide(self, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision:
        if load.scaling.target_concurrency == 7:
            raise ZeroDivisionError
        return super().decide(load, state, now)


class World:
    """A state cache and a planner of functions that scale by load."""

    def __init__(self) -> None:
        self.cache, numbers = ClusterStateCache(), iter(range(1000))
        self.planner = ScalingPlanner(FragilePolicy(), lambda key: f"{key}-{next(numbers)}")
        self.total = DemandSum()
        self.now = 0.0

    def nodes(self, *names: str, **changes: object) -> None:
        for name in names:
            record = make_node(name, **changes)
            self.cache.apply(NodeUp(record=record, ttl_s=1e6), self.now)
            self.cache.channel_up(name, record.epoch)

    def deploy(self, name: str, version: int = 1, *, nbytes: int = MIB, **scaling: object) -> None:
        made = make_version(name, version, image=f"{name}{version}", nbytes=nbytes)
        settings = Scaling(**{"policy": ScalingMode.LOAD, **scaling})  # type: ignore[arg-type]
        head = Function(name=name, current=version, versions=(1, 2), scaling=settings)
        self.cache.apply(FunctionChanged(function=head, version=made), self.now)

    def instance(self, id_: str, node: str, name: str = "f", **changes: object) -> None:
        record = make_instance(id_, node, name=name, **changes)  # type: ignore[arg-type]
        self.cache.apply(InstanceChanged(record=record), self.now)
        seen = InstanceLoad(
            instance_id=id_,
            function=name,
            version=1,
            queued_prompt_tokens=0,
            running=0,
            waiting=0,
            decode_tokens_s=0.0,
            prefill_tokens_s=RATE,
            decode_steps=((1, 0.01), (16, 0.02)),
            kv_used_tokens=0,
            kv_tokens=100_000,
        )
        self.planner.outlook.capacities.put(node, (seen,))

    def plan(
        self, demand: dict[VersionKey, VersionDemand] | None = None, in_flight: dict[str, int] | None = None
    ) -> Plan:
        plan = self.planner.plan(self.cache, demand or {}, in_flight or {}, self.now)
        for id_, paused in plan.paused.items():
            self.cache.set_draining(id_, paused)
        return plan

    def paused(self) -> None:
        """Leave one of two instances of `f` paused, each with a call."""
        self.instance("i", "n0")
        self.instance("j", "n1")
        for self.now in (0.0, 100.0):
            plan = self.plan(running(3), {"i": 2, "j": 1})
        assert plan.paused == {"j": True} and stops(plan) == []


def running(calls: int, name: str = "f", version: int = 1, held: int = 0) -> dict[VersionKey, VersionDemand]:
    tokens = TokenLoad(held_tokens=held * PROMPT, kv_tokens=(calls + held) * 1200, service_s=2.0)
    return {VersionKey(name, version): VersionDemand(in_flight=calls, held=held, tokens=tokens)}


def starts(plan: Plan) -> list[str]:
    return [action.node for action in plan.actions if isinstance(action, StartAction)]


def stops(plan: Plan) -> list[str]:
    return [action.instance_id for action in plan.actions if isinstance(action, StopAction)]


def test_a_call_after_each_idle_spell_never_needs_a_second_instance() -> None:
    world = World()
    world.deploy("f")
    world.nodes(*(f"n{number}" for number in range(8)))
    world.instance("i", "n0")
    for number in range(1, 400):
        load = VersionLoad(
            function="f",
            version=1,
            in_flight=1,
            held=0,
            prefilling_tokens=PROMPT,
            kv_tokens=1200,
            arrived_calls=number,
            arrived_tokens=number * PROMPT,
            service_s=2.0,
        )
        world.now += 2.5
        assert starts(world.plan(world.total.update({"g": [load]}), {"i": 1})) == []
        world.now += 2.5
        assert starts(world.plan(world.total.update({"g": []}))) == []


def test_an_idle_instance_makes_room_for_calls_of_another_function() -> None:
    world = World()
    world.deploy("a", nbytes=60 * MIB)
    world.deploy("b", nbytes=60 * MIB)
    full = make_holding("a1", Tier.GPU, Tier.HOST, nbytes=60 * MIB)
    world.nodes("n0", holdings=(full,), gpu_free_bytes=4 * MIB)
    world.instance("i", "n0", "a")
    world.plan()
    world.now = 1.0
    busy = world.plan(running(1, "a") | running(0, "b", held=1), {"i": 1})
    assert stops(busy) == []
    assert stops(world.plan(running(0, "b", held=1))) == ["i"]


def test_a_function_without_an_instance_gets_a_node_of_the_one_with_the_most() -> None:
    world = World()
    for name in "abc":
        world.deploy(name, nbytes=60 * MIB)
    for node, name in (("n0", "a"), ("n1", "b"), ("n2", "b"), ("n3", "b")):
        full = make_holding(f"{name}1", Tier.GPU, Tier.HOST, nbytes=60 * MIB)
        world.nodes(node, holdings=(full,), gpu_free_bytes=4 * MIB)
        world.instance(f"i-{node}", node, name)
    calls = {"i-n0": 1, "i-n1": 9, "i-n2": 5, "i-n3": 7}
    flood = running(1, "a") | running(21, "b", held=500)
    waiting = running(0, "c", held=1)
    assert stops(world.plan(flood, calls)) == []  # more calls alone take nothing from others
    patient = world.plan(flood | waiting, calls)  # for as long as a start takes
    assert stops(patient) == [] and patient.next_at is not None
    world.now = patient.next_at
    assert stops(world.plan(flood | waiting, calls)) == ["i-n2"]
    plan = world.plan(flood | waiting, calls)
    assert (stops(plan), starts(plan)) == ([], [])  # its node is kept for it


def test_the_patience_of_a_function_without_an_instance_begins_with_its_calls() -> None:
    world = World()
    for name in "bc":
        world.deploy(name, nbytes=60 * MIB)
    for node in ("n0", "n1"):
        full = make_holding("b1", Tier.GPU, Tier.HOST, nbytes=60 * MIB)
        world.nodes(node, holdings=(full,), gpu_free_bytes=4 * MIB)
        world.instance(f"i-{node}", node, "b")
    calls, flood, waiting = {"i-n0": 9, "i-n1": 9}, running(18, "b", held=500), running(0, "c", held=1)
    world.plan(flood | waiting, calls)
    world.plan(flood, calls)
    world.now = 1000.0
    assert stops(world.plan(flood | waiting, calls)) == []


def test_a_surplus_start_that_the_others_load_from_is_not_the_one_to_stop() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1", "n2", reads_store=True)
    plan = world.plan(running(0, held=20))
    started = [action for action in plan.actions if isinstance(action, StartAction)]
    (loader,) = (action for action in started if not action.holders)
    assert len(started) == 3 and all(
        [holder.node for holder in one.holders] == [loader.node] for one in started if one is not loader
    )
    for action in started:
        world.instance(action.instance_id, action.node, state=InstanceState.LOADING, since=world.now)
    world.now = 120.0
    assert stops(world.plan(running(0, held=9))) == []
    world.now = 240.0
    stopped = stops(world.plan(running(0, held=1)))
    assert sorted([*stopped, loader.instance_id]) == sorted(action.instance_id for action in started)


def test_the_start_that_others_load_from_stays_while_they_have_no_record_yet() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1", reads_store=True)
    plan = world.plan(running(0, held=20))
    started = [action for action in plan.actions if isinstance(action, StartAction)]
    (loader,) = (action for action in started if not action.holders)
    assert len(started) == 2
    world.instance(loader.instance_id, loader.node, state=InstanceState.LOADING)
    world.now = 120.0
    less = world.plan(running(0, held=1))
    assert less.desired[VersionKey("f", 1)] == 1 and stops(less) == []
    (other,) = (action for action in started if action is not loader)
    world.instance(other.instance_id, other.node, state=InstanceState.LOADING)
    assert stops(world.plan(running(0, held=1))) == [other.instance_id]


def test_the_only_instance_of_another_function_is_not_taken_while_it_has_calls() -> None:
    world = World()
    for name, node in (("a", "n0"), ("b", "n1")):
        world.deploy(name, nbytes=60 * MIB)
        full = make_holding(f"{name}1", Tier.GPU, Tier.HOST, nbytes=60 * MIB)
        world.nodes(node, holdings=(full,), gpu_free_bytes=4 * MIB)
        world.instance(f"i-{node}", node, name)
    world.deploy("c", nbytes=60 * MIB)
    demand = running(1, "a") | running(1, "b") | running(0, "c", held=1)
    assert stops(world.plan(demand, {"i-n0": 1, "i-n1": 1})) == []


def test_a_free_node_goes_to_a_function_without_an_instance_first() -> None:
    world = World()
    for name in "ab":
        world.deploy(name, nbytes=60 * MIB)
    full = make_holding("a1", Tier.GPU, Tier.HOST, nbytes=60 * MIB)
    world.nodes("n0", holdings=(full,), gpu_free_bytes=4 * MIB)
    world.instance("i", "n0", "a")
    world.nodes("n1", gpu_bytes=64 * MIB, gpu_free_bytes=64 * MIB)
    plan = world.plan(running(9, "a", held=500) | running(0, "b", held=1), {"i": 9})
    assert [(a.version.function, a.node) for a in plan.actions if isinstance(a, StartAction)] == [("b", "n1")]


def test_a_redeploy_on_a_full_cluster_takes_the_room_of_the_old_version() -> None:
    world = World()
    world.deploy("f", nbytes=60 * MIB)
    full = make_holding("f1", Tier.GPU, Tier.HOST, nbytes=60 * MIB)
    world.nodes("n0", holdings=(full,), gpu_free_bytes=4 * MIB)
    world.instance("i", "n0")
    world.plan()
    world.deploy("f", 2, nbytes=60 * MIB)
    world.now = 1.0
    assert stops(world.plan(running(0, version=2, held=1))) == ["i"]


def test_paused_instances_of_a_retiring_version_are_not_in_the_way_of_the_new_one() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1")
    world.paused()
    world.deploy("f", 2)
    assert stops(world.plan(running(3), {"i": 2, "j": 1})) == ["j"]


def test_a_scale_to_the_node_of_a_paused_instance_uses_it_again() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1")
    world.paused()
    target = ScaleTarget(function="f", instances=1, on=("n1",), token="t")
    world.cache.apply(ScaleRequested(target=target), world.now)
    plan = world.plan(running(3), {"i": 2, "j": 1})
    assert plan.paused == {"j": False} and starts(plan) == []
    assert stops(world.plan(running(3), {"i": 2, "j": 1})) == ["i"]


def test_only_ready_instances_on_usable_nodes_serve_again() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1", "n2")
    world.paused()
    world.cache.channel_down("n1")
    burst = world.plan(running(3, held=40), {"i": 2, "j": 1})
    assert burst.paused == {} and starts(burst) == ["n2"]


def test_a_paused_instance_is_stopped_once_idle_and_used_again_by_the_next_controller() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1")
    world.paused()
    assert world.planner.stand_down() == ["j"]
    world.cache.set_draining("j", False)
    assert len(world.cache.ready(VersionKey("f", 1))) == 2
    plan = world.plan(running(3), {"i": 2, "j": 1})
    assert plan.paused == {} and stops(plan) == []  # what it finds it keeps for a while
    world.now += 100.0
    assert world.plan(running(3), {"i": 2, "j": 1}).paused == {"j": True}
    assert stops(world.plan(running(1), {"i": 1})) == ["j"]


def test_a_paused_instance_with_endless_calls_is_stopped_in_the_end() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1")
    world.paused()
    plan = world.plan(running(3), {"i": 2, "j": 1})
    assert plan.next_at is not None and plan.next_at <= 700.0
    world.now = 700.0
    assert stops(world.plan(running(3), {"i": 2, "j": 1})) == ["j"]


def test_what_arrived_before_a_lapse_of_the_lease_is_no_burst_after_it() -> None:
    world = World()
    world.deploy("f")
    world.nodes("n0", "n1", "n2")
    world.instance("i", "n0")
    key = VersionKey("f", 1)
    demand = replace(running(1)[key], tokens=TokenLoad(arrived_calls=10, arrived_tokens=10 * PROMPT))
    world.plan({key: demand}, {"i": 1})
    world.planner.stand_down()
    world.now = 1.0
    later = replace(demand, tokens=TokenLoad(arrived_calls=900, arrived_tokens=900 * PROMPT))
    plan = world.plan({key: later}, {"i": 1})
    trend = plan.decisions[key].decision.state.trend
    assert starts(plan) == [] and trend is not None and trend.short == 0.0


def test_a_failing_policy_keeps_what_runs_and_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.deploy("a", target_concurrency=7)
    world.deploy("b")
    world.nodes("n0", "n1")
    world.instance("i", "n0", "a")
    for _ in range(3):
        plan = world.plan(running(0, "b", held=1), {})
    assert [desired for key, desired in plan.desired.items() if key.function == "a"] == [1]
    assert world.planner.pending and stops(plan) == []
    assert caplog.text.count("the scaling policy failed") == 1
    world.instance("i", "n0", "a", state=InstanceState.STOPPED)
    assert world.plan(running(0, "a", held=1)).desired[VersionKey("a", 1)] == 1
