"""Starts within the arena's room, redeploys both ways, starts that nobody can make. Mostly pure."""

import asyncio

import pytest

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.control.assembly import ControlSettings
from gateway.core.contract import DispatchError
from gateway.planning.actions import FailStartAction, StartAction, StopAction
from gateway.planning.plan import Plan, PlannerSettings, VersionDemand
from gateway.planning.planner import ScalingPlanner
from gateway.planning.policy import ConcurrencyTarget
from registry.errors import RemoteError
from registry.records.change import FunctionChanged, InstanceChanged, NodeUp
from registry.records.function import Function, FunctionVersion
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import CachedImage, Tier
from registry.records.rollout import Rollout, RolloutPlan, RolloutState
from tests.fixtures.control import (
    MIB,
    ask,
    make_call,
    make_holding,
    make_instance,
    make_node,
    make_version,
    open_cluster,
)


class World:
    """A state cache and a planner; what is asked for happens only when a test says so."""

    def __init__(self, **deployed_mib: int) -> None:
        self.state_cache = ClusterStateCache()
        self.planner = ScalingPlanner(ConcurrencyTarget(), lambda key: f"{key}-{next(self._numbers)}")
        self._numbers = iter(range(1000))
        self.now = 0.0
        for name, mib in deployed_mib.items():
            self.deploy(name, nbytes=mib * MIB)

    def node(self, id_: str = "n0", *holdings: CachedImage, **changes: object) -> None:
        record = make_node(id_, holdings=holdings, **changes)
        self.state_cache.apply(NodeUp(record=record, ttl_s=60.0), self.now)
        self.state_cache.channel_up(id_, record.epoch)

    def deploy(self, name: str, version: int = 1, *, current: int = 0, nbytes: int = MIB) -> FunctionVersion:
        made = make_version(name, version, image=f"{name}{version}", nbytes=nbytes)
        head = Function(name=name, current=current or version, versions=(1, 2))
        self.state_cache.apply(FunctionChanged(function=head, version=made), self.now)
        return made

    def instance(self, id_: str, name: str, node: str = "n0", **changes: object) -> InstanceRecord:
        record = make_instance(id_, node, name=name, **changes)  # type: ignore[arg-type]
        self.state_cache.apply(InstanceChanged(record=record), self.now)
        return record

    def plan(self, *held: str) -> Plan:
        demands = {VersionKey(name, 1): VersionDemand(held=1) for name in held}
        return self.planner.plan(self.state_cache, demands, {}, self.now)


def image(name: str, mib: int) -> CachedImage:
    return make_holding(name, Tier.GPU, Tier.HOST, nbytes=mib * MIB)


def starts(plan: Plan) -> list[StartAction]:
    return [action for action in plan.actions if isinstance(action, StartAction)]


def stops(plan: Plan) -> list[str]:
    return [action.instance_id for action in plan.actions if isinstance(action, StopAction)]


def test_a_start_without_room_for_its_cache_makes_an_idle_instance_go() -> None:
    world = World(a=60, b=60)
    world.node("n0", image("a1", 60), gpu_bytes=187 * MIB, gpu_free_bytes=64 * MIB)
    world.instance("i", "a")
    (start,) = starts(world.plan("b"))  # the image alone would fit
    world.planner.on_no_space(start, world.state_cache, "the KV cache does not fit", world.now)
    plan = world.plan("b")
    assert (starts(plan), stops(plan)) == ([], ["i"])
    assert world.plan("b").actions == []
    world.instance("i", "a", state=InstanceState.STOPPED)
    world.node("n0", gpu_bytes=187 * MIB, gpu_free_bytes=187 * MIB)
    assert [s.version.function for s in starts(world.plan("b"))] == ["b"]


def test_it_is_given_up_once_an_empty_arena_is_too_small() -> None:
    world = World(b=60)
    world.node("n0", gpu_bytes=64 * MIB)
    (start,) = starts(world.plan("b"))
    world.planner.on_no_space(start, world.state_cache, "the KV cache does not fit", world.now)
    (given_up,) = world.plan("b").actions
    assert isinstance(given_up, FailStartAction) and list(given_up.starts) == ["n0"]
    assert given_up.reason == "the KV cache does not fit"
    assert world.plan("b").actions == []  # it is logged once a while
    world.now = 100.0
    world.plan()
    assert len(starts(world.plan("b"))) == 1  # and tried anew after a while


def test_room_stays_reserved_until_the_node_shows_the_region() -> None:
    world = World(a=40, b=40)
    world.node("n0")
    (first,) = starts(world.plan("a"))
    world.instance(first.instance_id, "a", state=InstanceState.STARTING)
    assert starts(world.plan("a", "b")) == []
    world.instance(first.instance_id, "a", state=InstanceState.LOADING)
    world.node("n0", gpu_free_bytes=24 * MIB)
    assert starts(world.plan("a", "b")) == []
    world.node("n0", gpu_bytes=128 * MIB, gpu_free_bytes=60 * MIB)
    assert [s.version.function for s in starts(world.plan("a", "b"))] == ["b"]


def test_a_draining_instance_does_not_block_its_node() -> None:
    world = World(a=40)
    world.node("n0", image("a1", 40), gpu_free_bytes=24 * MIB)
    world.instance("old", "a", state=InstanceState.DRAINING)
    assert [s.node for s in starts(world.plan("a"))] == ["n0"]


@pytest.mark.parametrize(("needed", "gone"), [(50, ["i", "j"]), (40, ["i"])])
def test_images_that_nothing_uses_count_as_room_before_an_instance_goes(needed: int, gone: list[str]) -> None:
    world = World(a=20, c=20, b=needed)
    world.node("n0", image("a1", 20), image("c1", 20), image("gone", 20), gpu_free_bytes=4 * MIB)
    world.instance("i", "a", since=1.0)
    world.instance("j", "c", since=2.0)
    assert stops(world.plan("b")) == gone  # 4 + 20 idle + 20 are enough for 40


def end_late_calls(world: World, *held: str) -> Plan:
    """Let the time pass in which calls of a version that was just left may come; return the plan after it."""
    plan = world.plan(*held)
    assert stops(plan) == [] and plan.next_at == world.now + PlannerSettings().late_calls_s
    world.now = plan.next_at
    return world.plan(*held)


def test_a_rollback_starts_the_old_version_before_the_new_one_goes() -> None:
    world = World()
    world.deploy("f", 1)
    world.node("n0")
    world.node("n1")
    world.instance("one", "f", version=1)
    world.plan()
    world.deploy("f", 2)
    (ahead,) = starts(world.plan())
    assert ahead.version.version == 2
    world.instance(ahead.instance_id, "f", version=2, node="n1")
    assert stops(end_late_calls(world)) == ["one"]
    world.instance("one", "f", version=1, state=InstanceState.STOPPED)
    world.plan()
    world.deploy("f", 1, current=1)
    plan = world.plan()
    assert [s.version.version for s in starts(plan)] == [1] and stops(plan) == []
    world.instance(starts(plan)[0].instance_id, "f", version=1)
    assert stops(end_late_calls(world)) == [ahead.instance_id]


def test_a_start_that_nobody_can_give_bytes_for_is_told_after_a_while() -> None:
    world = World()
    world.deploy("a")
    world.node("n0", reads_store=False)
    plan = world.plan("a")
    assert (plan.actions, plan.next_at) == ([], 5.0)
    world.now = 5.0
    (given_up,) = world.plan("a").actions
    assert isinstance(given_up, FailStartAction) and "none can read the store" in given_up.reason


async def test_calls_hear_why_nobody_can_start_their_function() -> None:
    settings = ControlSettings(planner=PlannerSettings(no_source_s=0.0))
    async with open_cluster(1, settings=settings, reads_store=False) as cluster:
        version = await cluster.deploy()
        with pytest.raises(DispatchError, match="none can read the store"):
            await ask(cluster.control, make_call(version))


async def test_calls_stay_held_while_idle_instances_make_room() -> None:
    async with open_cluster(1, gpu_bytes=4 * MIB) as cluster:
        first = await cluster.deploy(nbytes=2 * MIB)
        second = await cluster.deploy(name="g", image="image-2", nbytes=2 * MIB)
        await ask(cluster.control, make_call(first))
        node = cluster.nodes["n0"]
        node.start_error = RemoteError("out_of_memory", "the KV cache does not fit")
        call = asyncio.create_task(ask(cluster.control, make_call(second)))
        await cluster.until_gone("f")
        node.start_error = None
        assert (await call).assigned.node == "n0"


def roll_out(world: World, state: RolloutState = RolloutState.RUNNING, *, current: int = 1) -> None:
    """Roll out version 2 of function a, of which version 1 is deployed."""
    made = make_version("a", 2, image="a2", nbytes=MIB)
    rollout = Rollout(
        id="r",
        stable=1,
        plan=RolloutPlan(candidate=2, percent=10),
        started_at=0.0,
        since=0.0,
        state=state,
    )
    head = Function(name="a", current=current, versions=(1, 2), rollout=rollout)
    world.state_cache.apply(FunctionChanged(function=head, version=made), world.now)


def test_a_candidate_has_an_instance_beside_the_current_version_until_it_is_given_up() -> None:
    world = World(a=1)
    world.node("n0")
    world.node("n1")
    world.instance("old", "a")
    world.plan("a")
    roll_out(world, RolloutState.STARTING)
    plan = world.plan("a")
    assert [start.version.version for start in starts(plan)] == [2] and stops(plan) == []
    world.instance(starts(plan)[0].instance_id, "a", node="n1", version=2)
    roll_out(world)
    world.now = 1000.0  # far beyond its keep-alive
    assert stops(world.plan("a")) == []
    fresh = ScalingPlanner(ConcurrencyTarget(), str)  # of a controller that has just taken over
    assert stops(fresh.plan(world.state_cache, {VersionKey("a", 1): VersionDemand(held=1)}, {}, 0.0)) == []
    roll_out(world, RolloutState.ROLLED_BACK)
    assert stops(end_late_calls(world, "a")) == [starts(plan)[0].instance_id]


def test_a_promoted_candidate_takes_over_and_the_version_before_retires() -> None:
    world = World(a=1)
    world.node("n0")
    world.node("n1")
    world.instance("old", "a")
    roll_out(world)
    world.instance("new", "a", node="n1", version=2)
    assert stops(world.plan("a")) == []
    roll_out(world, RolloutState.PROMOTED, current=2)
    assert stops(end_late_calls(world)) == ["old"]
