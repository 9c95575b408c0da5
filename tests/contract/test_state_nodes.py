"""What every State promises of who is there: nodes and their instances, gateways' demand, leases."""

import asyncio
from dataclasses import replace

import pytest

from registry.errors import StaleEpoch
from registry.records.change import (
    SCALE_REQUEST_S,
    InstanceChanged,
    LoadReport,
    NodeGone,
    NodeUp,
    ScaleTarget,
    VersionLoad,
)
from registry.records.fence import Fence
from registry.records.instance import InstanceState
from registry.state import State
from tests.fixtures.registry_records import instance, node
from tests.fixtures.state import LAPSE_S, Lapse, after


async def test_epochs_of_a_node_only_grow(state: State):
    assert await state.next_node_epoch("n0") < await state.next_node_epoch("n0")
    assert await state.next_node_epoch("n1") == 1
    await state.put_node(node("n1", epoch=5), 60)
    assert await state.next_node_epoch("n1") == 6


async def test_a_former_process_of_a_node_is_fenced(state: State):
    await state.put_node(node(epoch=1), 60)
    await state.put_instance(instance(), 1)
    await state.put_node(node(epoch=2), 60)
    with pytest.raises(StaleEpoch):
        await state.put_node(node(epoch=1), 60)
    with pytest.raises(StaleEpoch):
        await state.put_instance(instance("late"), 1)
    await state.remove_node("n0", 1)
    snapshot = await state.snapshot()
    assert [up.record.epoch for up in snapshot.nodes] == [2]
    assert snapshot.instances == ()  # they went with the process that had them


async def test_an_epoch_given_out_fences_before_its_first_heartbeat(state: State):
    await state.put_node(node(epoch=await state.next_node_epoch("n0")), 60)
    await state.next_node_epoch("n0")
    with pytest.raises(StaleEpoch):
        await state.put_node(node(epoch=1), 60)


async def test_the_feed_tells_that_a_node_was_replaced(state: State):
    await state.put_node(node(epoch=1), 60)
    cursor = (await state.snapshot()).cursor
    await state.put_instance(instance("early"), 2)  # before the first heartbeat of epoch 2
    await state.put_node(node(epoch=2), 60)
    early = InstanceChanged(record=instance("early"))
    assert await after(state, cursor, 4) == [
        early,
        NodeGone(id="n0", epoch=1),
        NodeUp(record=node(epoch=2), ttl_s=60),
        early,
    ]
    assert (await state.snapshot()).instances == (instance("early"),)


async def test_a_removed_node_takes_its_instances_along(state: State):
    await state.put_node(node(), 60)
    await state.put_instance(instance(), 1)
    cursor = (await state.snapshot()).cursor
    await state.remove_node("n0", 1)
    await state.remove_node("n0", 1)
    await state.put_node(node("n1"), 60)
    snapshot = await state.snapshot()
    assert [up.record.id for up in snapshot.nodes] == ["n1"]
    assert snapshot.instances == ()
    gone, up = await after(state, cursor, 2)
    assert gone == NodeGone(id="n0", epoch=1)
    assert isinstance(up, NodeUp)


async def test_a_node_without_heartbeats_vanishes_and_comes_back_with_its_instances(
    lapsing_state: tuple[State, Lapse],
):
    state, lapse = lapsing_state
    await state.put_node(node(), LAPSE_S)
    await state.put_instance(instance(), 1)
    await lapse()
    snapshot = await state.snapshot()
    assert (snapshot.nodes, snapshot.instances) == ((), ())
    cursor = snapshot.cursor
    await state.put_node(node(), 60)
    assert (await state.snapshot()).instances == (instance(),)
    assert await after(state, cursor, 2) == [
        NodeUp(record=node(), ttl_s=60),
        InstanceChanged(record=instance()),
    ]


async def test_a_final_instance_is_deleted_and_announced(state: State):
    await state.put_node(node(), 60)
    await state.put_instance(instance(), 1)
    cursor = (await state.snapshot()).cursor
    final = instance(state=InstanceState.FAILED, error="out of memory")
    await state.put_instance(final, 1)
    assert (await state.snapshot()).instances == ()
    assert await after(state, cursor, 1) == [InstanceChanged(record=final)]


async def test_demand_of_a_silent_gateway_vanishes(lapsing_state: tuple[State, Lapse]):
    state, lapse = lapsing_state
    await state.put_load_report("g", [], LAPSE_S)
    await lapse()
    assert (await state.snapshot()).load_reports == ()


async def test_demand_replaces_what_the_gateway_said_before(state: State):
    one = VersionLoad(function="tiny", version=1, in_flight=1, held=0)
    cursor = (await state.snapshot()).cursor
    await state.put_load_report("g", [one], 60)
    await state.put_load_report("g", [], 60)
    assert [change.loads for change in (await state.snapshot()).load_reports] == [()]
    assert await after(state, cursor, 2) == [
        LoadReport(gateway="g", loads=(one,), ttl_s=60),
        LoadReport(gateway="g", loads=(), ttl_s=60),
    ]


async def test_a_wish_is_announced_once_a_token(state: State):
    cursor = (await state.snapshot()).cursor
    wishes = [
        ScaleTarget(function="tiny", instances=count, token=token)
        for count, token in ((1, "a"), (1, "a"), (2, "b"), (3, "c"), (1, "a"))
    ]
    for wish in wishes:
        await state.request_scale(wish)
    changes = await after(state, cursor, 3)
    assert [change.target.instances for change in changes] == [1, 2, 3]  # type: ignore[union-attr]


async def test_a_snapshot_has_the_last_wish_of_each_function(state: State):
    wishes = [
        ScaleTarget(function=name, instances=count, on=("n0",), token=f"{name}{count}")
        for name, count in (("tiny", 1), ("other", 3), ("tiny", 2))
    ]
    for wish in wishes:
        await state.request_scale(wish)
    await state.request_scale(wishes[0])  # the token is known: the wish before it stands
    found = (await state.snapshot()).scale_requests
    assert [one.target for one in found] == wishes[1:]
    assert all(0 < one.ttl_s <= SCALE_REQUEST_S for one in found)


async def test_a_wish_leaves_the_snapshot_when_it_is_too_old(lapsing_state: tuple[State, Lapse]):
    state, lapse = lapsing_state
    await state.request_scale(ScaleTarget(function="tiny", instances=1, token="a"), LAPSE_S)
    await lapse()
    assert (await state.snapshot()).scale_requests == ()


async def test_a_lease_has_one_holder_and_a_growing_epoch(state: State):
    first = await state.acquire_lease("controller", "a", 60)
    assert first is not None
    assert await state.acquire_lease("controller", "b", 60) is None
    assert await state.acquire_lease("controller", "a", 60) == first
    await state.release_lease("controller", "b")  # not the holder: nothing happens
    assert await state.acquire_lease("controller", "b", 60) is None
    await state.release_lease("controller", "a")
    second = await state.acquire_lease("controller", "b", 60)
    assert second is not None and second > first
    assert second.incarnation == first.incarnation
    other = await state.acquire_lease("other", "b", 60)
    assert other == Fence(first.incarnation, 1)


async def test_a_state_older_than_what_was_seen_gets_a_new_incarnation(state: State):
    first = await state.acquire_lease("controller", "a", 60)
    assert first is not None
    seen = replace(first, epoch=7)  # by a node, before the state was restored from a backup
    assert await state.acquire_lease("controller", "b", 60, beyond=seen) is None  # does not hold it
    second = await state.acquire_lease("controller", "a", 60, beyond=seen)
    assert second is not None and second > seen and second.incarnation > first.incarnation
    assert second.epoch == 8  # records that only have an epoch stay in order
    assert await state.acquire_lease("controller", "a", 60, beyond=second) == second
    assert await state.acquire_lease("controller", "a", 60) == second
    await state.release_lease("controller", "a")
    later = Fence("e" * 20, 3)  # whatever the clock shows
    third = await state.acquire_lease("controller", "b", 60, beyond=later)
    assert third is not None and third > later


async def test_one_of_many_gets_the_lease(state: State):
    tries = [state.acquire_lease("controller", f"g{index}", 60) for index in range(50)]
    (fence,) = [one for one in await asyncio.gather(*tries) if one is not None]
    assert fence.epoch == 1


async def test_a_lease_runs_out(lapsing_state: tuple[State, Lapse]):
    state, lapse = lapsing_state
    first = await state.acquire_lease("controller", "a", LAPSE_S)
    await lapse()
    second = await state.acquire_lease("controller", "b", 60)
    assert first is not None and second is not None and second > first
    assert await state.acquire_lease("controller", "a", 60) is None
