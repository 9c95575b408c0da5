"""Groups as the control loop starts, ends and re-forms them, over fake nodes; and what planning does."""

import asyncio
from dataclasses import replace

import pytest

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.core.contract import DispatchError
from gateway.fakes.node import tokens_after
from gateway.planning.actions import FailStartAction, FetchLayersAction, StartAction, StopAction
from gateway.planning.groups import LayerSizes
from gateway.planning.plan import Plan, VersionDemand
from gateway.planning.planner import ScalingPlanner
from gateway.planning.policy import ConcurrencyTarget
from registry.messages.node import RequestUsage, Tokens
from registry.records.change import FunctionChanged, InstanceChanged, NodeUp
from registry.records.function import Function, Scaling
from registry.records.instance import GroupMember, InstanceGroup, InstanceRecord, InstanceState
from registry.records.node import CachedImage, Tier
from tests.fixtures.control import (
    EXPECTED,
    MIB,
    FakeCluster,
    ask,
    make_call,
    make_holding,
    make_instance,
    make_node,
    make_version,
    open_cluster,
)
from tests.fixtures.patience import until

ARENA = 800 << 10  # the image has a MiB: two nodes can share it
STAYS = Scaling(keep_alive_s=600.0, target_concurrency=4)


def groups(cluster: FakeCluster) -> set[InstanceGroup]:
    found = (one.group for one in cluster.control.state_cache.instances())
    return {group for group in found if group is not None}


async def test_two_nodes_answer_as_one_instance_and_both_are_paid() -> None:
    async with open_cluster(3, gpu_bytes=ARENA) as cluster:
        version = await cluster.deploy(STAYS)
        call = cluster.control.dispatcher.run(make_call(version))
        ids: list[int] = []
        async with call as replies:
            async for event in replies:
                if isinstance(event, Tokens):
                    ids += event.ids
                if isinstance(event, RequestUsage):
                    assert event.completion_tokens == len(EXPECTED)
        assert ids == EXPECTED
        (group,) = groups(cluster)
        assert cluster.counts("starts") == 2 and len(group.members) == 2
        used = {one.gpu.node: one for one in call.used}
        assert set(used) == {member.node for member in group.members}
        assert all(one.exact and one.gpu.gpu_us > 0 for one in used.values())
        key = VersionKey("f", 1)
        (ready,) = cluster.control.state_cache.ready(key)
        assert ready.instance_id == group.leader.instance_id


@pytest.mark.parametrize("leads", [True, False])
async def test_a_lost_member_ends_the_group_and_another_one_continues_its_calls(leads: bool) -> None:
    async with open_cluster(3, gpu_bytes=ARENA, ttl_s=60.0) as cluster:
        version = await cluster.deploy(STAYS)
        await ask(cluster.control, make_call(version, request_id="first"))
        (before,) = groups(cluster)
        planner = cluster.control._controller._planner
        await until(lambda: not planner.pending)  # else it waits for records of instances that are gone
        cluster.hold_tokens()
        running = asyncio.create_task(ask(cluster.control, make_call(version, tokens=12)))
        leader = cluster.nodes[before.leader.node]
        await leader.token.arrived()
        gone = before.leader.node if leads else before.others(before.leader.instance_id)[0].node
        await cluster.nodes[gone].kill()
        cluster.give_tokens()
        answer = await running
        assert answer.ids == tokens_after((1, 2, 3), 12)
        await cluster.until(lambda: len(groups(cluster) - {before}) == 1)
        (after,) = groups(cluster) - {before}
        assert gone not in {member.node for member in after.members}


async def test_a_group_stops_as_one_instance() -> None:
    async with open_cluster(2, gpu_bytes=ARENA) as cluster:
        version = await cluster.deploy(replace(STAYS, keep_alive_s=0.1))
        await ask(cluster.control, make_call(version))
        await cluster.until_gone()
        assert cluster.counts("stops") == 2


async def test_an_image_larger_than_all_arenas_together_fails_with_the_numbers() -> None:
    async with open_cluster(2, gpu_bytes=400 << 10) as cluster:
        version = await cluster.deploy()
        numbers = (
            f"{MIB} bytes, the largest accelerator arena only 409600, and the 2 largest together only 819200"
        )
        with pytest.raises(DispatchError, match=numbers):
            await ask(cluster.control, make_call(version))


# --- planning alone

LAYERS = LayerSizes(
    starts=tuple(layer * 10 * MIB for layer in range(8)),
    ends=tuple((layer + 1) * 10 * MIB for layer in range(8)),
    head_first=False,
)


class World:
    """A planner of a function `big`, of 80 MiB, over nodes with 64 MiB; `small` has other images."""

    def __init__(self, nodes: int = 2) -> None:
        self.state_cache = ClusterStateCache()
        self._numbers = iter(range(1000))
        self.planner = ScalingPlanner(ConcurrencyTarget(), lambda key: f"{key}-{next(self._numbers)}")
        self.now = 0.0
        self.big = self.deploy("big", 80)
        for number in range(nodes):
            self.node(f"n{number}")

    def node(self, id_: str, *holdings: CachedImage, **changes: object) -> None:
        record = make_node(id_, holdings=holdings, **changes)
        self.state_cache.apply(NodeUp(record=record, ttl_s=60.0), self.now)
        self.state_cache.channel_up(id_, record.epoch)

    def deploy(self, name: str, mib: int):
        made = make_version(name, image=f"{name}1", nbytes=mib * MIB)
        head = Function(name=name, current=1, versions=(1,))
        self.state_cache.apply(FunctionChanged(function=head, version=made), self.now)
        return made

    def put(self, record: InstanceRecord) -> None:
        self.state_cache.apply(InstanceChanged(record=record), self.now)

    def plan(self, *held: str) -> Plan:
        demands = {VersionKey(name, 1): VersionDemand(held=1) for name in held}
        return self.planner.plan(self.state_cache, demands, {}, self.now)

    def know_layers(self) -> None:
        (action,) = [one for one in self.plan("big").actions if isinstance(one, FetchLayersAction)]
        assert self.plan("big").actions == []  # once
        self.planner.on_layers(action.version, LAYERS)

    def starts(self) -> list[StartAction]:
        return [one for one in self.plan("big").actions if isinstance(one, StartAction)]

    def accept(self, start: StartAction, state: InstanceState) -> None:
        assert start.group is not None
        self.put(make_instance(start.instance_id, start.node, name="big", state=state, group=start.group))


def stops(plan: Plan) -> set[str]:
    return {one.instance_id for one in plan.actions if isinstance(one, StopAction)}


def test_the_members_start_together_once_the_layers_are_known() -> None:
    world = World()
    world.know_layers()
    one, other = world.starts()
    assert one.group == other.group and one.group is not None
    assert {one.node, other.node} == {"n0", "n1"}
    assert [member.last - member.first for member in one.group.members] == [4, 4]
    assert one.cast is None and not one.loads_whole
    assert world.starts() == []  # they are under way
    assert world.planner.loading(world.state_cache, world.big.image or "") == []


def test_it_is_one_instance_for_the_scaler() -> None:
    world = World(4)
    world.know_layers()
    starts = world.starts()
    for start in starts:
        world.accept(start, InstanceState.READY)
    plan = world.plan("big")
    assert plan.decisions[VersionKey("big", 1)].load.ready == 1
    assert not plan.actions


def test_of_a_group_that_lost_a_member_the_others_stop() -> None:
    world = World(3)
    world.know_layers()
    one, other = world.starts()
    world.accept(one, InstanceState.READY)
    assert stops(world.plan("big")) == set()  # the other one is still being started
    world.accept(other, InstanceState.READY)
    assert stops(world.plan("big")) == set()
    assert one.group is not None and one.group.leader.node == other.node
    world.state_cache.channel_down(one.node)
    assert stops(world.plan("big")) == set()  # the leader knows better whether it is lost
    world.state_cache.channel_up(one.node, 1)
    world.state_cache.channel_down(other.node)
    assert stops(world.plan("big")) == {one.instance_id}


def test_the_members_of_a_leader_that_has_ended_stop() -> None:
    world = World()
    world.know_layers()
    starts = {one.instance_id: one for one in world.starts()}
    for start in starts.values():
        world.accept(start, InstanceState.READY)
    group = next(iter(starts.values())).group
    assert group is not None and stops(world.plan()) == set()
    world.accept(starts[group.leader.instance_id], InstanceState.FAILED)
    (other,) = group.others(group.leader.instance_id)
    assert stops(world.plan()) == {other.instance_id}


def test_idle_instances_go_where_a_group_needs_their_room() -> None:
    world = World(0)
    world.deploy("small", 40)
    holding = make_holding("small1", Tier.GPU, Tier.HOST, nbytes=40 * MIB)
    world.node("n0", holding, gpu_free_bytes=24 * MIB)
    world.node("n1")
    world.put(make_instance("idle", "n0", name="small"))
    world.know_layers()
    assert stops(world.plan("big")) == {"idle"}
    world.put(make_instance("idle", "n0", name="small", state=InstanceState.STOPPED))
    world.node("n0")
    assert {one.node for one in world.starts()} == {"n0", "n1"}


def test_a_cache_without_room_makes_the_next_group_wider_and_then_fails() -> None:
    world = World(3)
    world.know_layers()
    one, other = world.starts()
    world.planner.on_no_space(one, world.state_cache, "the KV cache does not fit", world.now)
    world.planner.cancel_start(other.instance_id)
    wider = world.starts()
    assert len(wider) == 3
    for start in wider:
        world.planner.on_no_space(start, world.state_cache, "the KV cache does not fit", world.now)
    world.plan("big")
    world.now += 10.0
    (given_up,) = world.plan("big").actions
    assert isinstance(given_up, FailStartAction) and given_up.reason == "the KV cache does not fit"


def test_each_member_reads_its_part_where_no_node_holds_the_image() -> None:
    world = World()
    world.know_layers()
    assert [start.holders for start in world.starts()] == [(), ()]
    world = World(0)
    world.node("n0")
    world.node("n1", make_holding("big1", Tier.HOST, nbytes=80 * MIB))
    world.know_layers()
    holders = {start.node: [one.node for one in start.holders] for start in world.starts()}
    assert holders["n0"] == ["n1"]


def test_an_idle_group_goes_as_a_whole_where_another_one_needs_its_room() -> None:
    world = World(0)
    world.deploy("old", 80)
    world.node("n0", gpu_free_bytes=20 * MIB)
    world.node("n1", gpu_free_bytes=20 * MIB)
    parts = [
        GroupMember(node=f"n{n}", instance_id=f"old-{n}", first=4 * n, last=4 * n + 4, image_bytes=40 * MIB)
        for n in range(2)
    ]
    group = InstanceGroup(members=tuple(parts), head=1)
    for part in parts:
        world.put(make_instance(part.instance_id, part.node, name="old", group=group))
    world.know_layers()
    assert stops(world.plan("big")) == {"old-1"}
    assert stops(world.plan("big")) == set()  # it is on its way
    world.put(make_instance("old-1", "n1", name="old", state=InstanceState.STOPPED, group=group))
    assert stops(world.plan("big")) == {"old-0"}
