"""What every State promises, asked of the one in Redis and of the one in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from registry.api_key import Role
from registry.change import (
    Change,
    Demand,
    DemandChanged,
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    NodeGone,
    NodeUp,
    ScaleAsked,
    ScaleTarget,
)
from registry.errors import InvalidRecord, NotFound, StaleEpoch
from registry.function import Scaling
from registry.instance import InstanceState
from registry.memory_state import MemoryState
from registry.redis_connections import Connections
from registry.redis_state import RedisState
from registry.secrets import new_api_key
from registry.state import ClusterConfig, State
from tests.patience import PATIENCE_S
from tests.registry_records import draft, instance, node

Scenario = Callable[[State], Awaitable[None]]
FEED_LENGTH = 200


@pytest.fixture(params=["memory", "redis"])
def run(request: pytest.FixtureRequest, redis_url: str) -> Callable[[Scenario], None]:
    """Runs a scenario against an empty state."""

    async def in_redis(scenario: Scenario) -> None:
        connections = Connections(redis_url)
        await connections.call("FLUSHALL")
        await connections.aclose()
        async with RedisState.connect(redis_url, feed_length=FEED_LENGTH) as state:
            await scenario(state)

    async def in_memory(scenario: Scenario) -> None:
        await scenario(MemoryState(feed_length=FEED_LENGTH))

    main = in_redis if request.param == "redis" else in_memory
    return lambda scenario: asyncio.run(main(scenario))


async def after(state: State, cursor: str, count: int) -> list[Change]:
    """The next `count` changes after a cursor."""
    found: list[Change] = []
    feed = state.watch(cursor)
    async with asyncio.timeout(PATIENCE_S):
        async for _, change in feed:
            found.append(change)
            if len(found) == count:
                break
    await feed.aclose()  # type: ignore[attr-defined]
    return found


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when the condition holds: of an expiry there is no other sign than that it shows."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.002)


def test_the_cluster_is_configured_once(run):
    async def scenario(state: State) -> None:
        with pytest.raises(NotFound):
            await state.cluster_config()
        first = ClusterConfig(cluster_id="c1", store_url="file:///s")
        assert await state.cluster_config(first) == first
        assert await state.cluster_config(replace(first, cluster_id="c2")) == first
        assert await state.cluster_config() == first

    run(scenario)


def test_versions_are_numbered_and_roll_back(run):
    async def scenario(state: State) -> None:
        one = await state.create_version(draft(), Scaling(min_instances=1))
        two = await state.create_version(draft(image="d" * 64), None)
        assert (one.version, two.version) == (1, 2)
        head = await state.function("tiny")
        assert (head.current, head.versions, head.scaling.min_instances) == (2, (1, 2), 1)
        assert await state.version("tiny") == two
        assert await state.version("tiny", 1) == one
        assert (await state.set_current("tiny", 1)).current == 1
        assert await state.version("tiny") == one
        assert await state.versions("tiny") == [one, two]
        with pytest.raises(NotFound):
            await state.set_current("tiny", 3)
        with pytest.raises(NotFound):
            await state.version("tiny", 3)
        with pytest.raises(NotFound):
            await state.version("other")
        with pytest.raises(NotFound):
            await state.versions("other")
        with pytest.raises(NotFound):
            await state.set_scaling("other", Scaling())
        with pytest.raises(InvalidRecord):
            await state.create_version(draft("Bad Name"), None)

    run(scenario)


def test_an_equal_draft_makes_no_version_but_takes_its_scaling(run):
    async def scenario(state: State) -> None:
        one = await state.create_version(draft(), None)
        cursor = (await state.snapshot()).cursor
        again = await state.create_version(draft(created_at=5.0), Scaling(keep_alive_s=3))
        assert again == one
        assert (await state.function("tiny")).scaling.keep_alive_s == 3
        await state.create_version(draft(), None)  # changes nothing, so it is not in the feed
        await state.create_version(draft("second"), None)
        changes = await after(state, cursor, 2)
        assert [change.function.name for change in changes] == ["tiny", "second"]  # type: ignore[union-attr]

    run(scenario)


def test_a_version_can_be_stored_without_becoming_current(run):
    async def scenario(state: State) -> None:
        one = await state.create_version(draft(), None)
        cursor = (await state.snapshot()).cursor
        await state.create_version(draft(image="d" * 64), None, make_current=False)
        assert await state.version("tiny") == one
        (change,) = await after(state, cursor, 1)
        assert isinstance(change, FunctionChanged)
        assert (change.version, change.function.versions) == (one, (1, 2))

    run(scenario)


def test_concurrent_deploys_of_one_name_get_different_numbers(run):
    async def scenario(state: State) -> None:
        drafts = [draft(image=f"{index:064x}") for index in range(20)]
        versions = await asyncio.gather(*(state.create_version(one, None) for one in drafts))
        assert sorted(version.version for version in versions) == list(range(1, 21))
        assert (await state.function("tiny")).versions == tuple(range(1, 21))

    run(scenario)


def test_a_deleted_function_is_gone_and_its_numbers_stay_used(run):
    async def scenario(state: State) -> None:
        await state.create_version(draft(), None)
        cursor = (await state.snapshot()).cursor
        await state.delete_function("tiny")
        assert await state.functions() == []
        assert await state.versions() == []
        with pytest.raises(NotFound):
            await state.function("tiny")
        with pytest.raises(NotFound):
            await state.delete_function("tiny")
        assert (await state.create_version(draft(), None)).version == 2
        assert isinstance((await after(state, cursor, 1))[0], FunctionDeleted)

    run(scenario)


def test_snapshot_holds_everything_and_its_cursor_is_where_the_feed_goes_on(run):
    async def scenario(state: State) -> None:
        version = await state.create_version(draft(), None)
        await state.put_node(node(), 60)
        await state.put_instance(instance(), 1)
        demand = Demand(gateway="g", function="tiny", version=1, in_flight=2, held=1)
        await state.put_demand("g", [demand], 60)
        snapshot = await state.snapshot()
        assert snapshot.versions == (version,)
        assert [head.name for head in snapshot.functions] == ["tiny"]
        assert [up.record for up in snapshot.nodes] == [node()]
        assert 0 < snapshot.nodes[0].ttl_s <= 60
        assert snapshot.instances == (instance(),)
        assert snapshot.demands[0].demands == (demand,)
        assert 0 < snapshot.demands[0].ttl_s <= 60
        wish = ScaleTarget(function="tiny", instances=2, on=("n0",), token="t")
        await state.ask_scale(wish)
        assert await after(state, snapshot.cursor, 1) == [ScaleAsked(target=wish)]

    run(scenario)


def test_the_feed_is_in_order_and_resumes_at_any_cursor(run):
    async def scenario(state: State) -> None:
        start = (await state.snapshot()).cursor
        expected: list[Change] = []
        for index in range(10):
            record = instance(progress=index / 10)
            await state.put_instance(record, 1)
            expected.append(InstanceChanged(record=record))
        seen = []
        feed = state.watch(start)
        async for cursor, change in feed:
            seen.append((cursor, change))
            if len(seen) == 10:
                break
        await feed.aclose()  # type: ignore[attr-defined]
        assert [change for _, change in seen] == expected
        for index in range(9):
            rest = await after(state, seen[index][0], 9 - index)
            assert rest == expected[index + 1 :]

    run(scenario)


def test_a_watcher_gets_changes_as_they_happen(run):
    async def scenario(state: State) -> None:
        cursor = (await state.snapshot()).cursor
        waiting = asyncio.create_task(after(state, cursor, 1))
        await asyncio.sleep(0)
        await state.put_node(node(), 60)
        assert await waiting == [NodeUp(record=node(), ttl_s=60)]

    run(scenario)


def test_watchers_do_not_disturb_each_other(run):
    async def scenario(state: State) -> None:
        cursor = (await state.snapshot()).cursor
        watchers = [asyncio.create_task(after(state, cursor, 5)) for _ in range(20)]
        for index in range(5):
            await state.put_instance(instance(f"i{index}"), 1)
        results = await asyncio.gather(*watchers)
        assert all(result == results[0] for result in results)

    run(scenario)


def test_a_cursor_that_the_feed_left_behind_is_refused(run):
    async def scenario(state: State) -> None:
        cursor = (await state.snapshot()).cursor
        for _ in range(3 * FEED_LENGTH):
            await state.put_demand("g", [], 60)
        for bad in (cursor, "no such cursor", ""):
            with pytest.raises(NotFound):
                await after(state, bad, 1)

    run(scenario)


def test_epochs_of_a_node_only_grow(run):
    async def scenario(state: State) -> None:
        assert await state.next_node_epoch("n0") < await state.next_node_epoch("n0")
        assert await state.next_node_epoch("n1") == 1
        await state.put_node(node("n1", epoch=5), 60)
        assert await state.next_node_epoch("n1") == 6

    run(scenario)


def test_a_former_process_of_a_node_is_fenced(run):
    async def scenario(state: State) -> None:
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

    run(scenario)


def test_an_epoch_given_out_fences_before_its_first_heartbeat(run):
    async def scenario(state: State) -> None:
        await state.put_node(node(epoch=await state.next_node_epoch("n0")), 60)
        await state.next_node_epoch("n0")
        with pytest.raises(StaleEpoch):
            await state.put_node(node(epoch=1), 60)

    run(scenario)


def test_the_feed_tells_that_a_node_was_replaced(run):
    async def scenario(state: State) -> None:
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

    run(scenario)


def test_a_removed_node_takes_its_instances_along(run):
    async def scenario(state: State) -> None:
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

    run(scenario)


def test_a_node_without_heartbeats_vanishes_and_comes_back_with_its_instances(run):
    async def scenario(state: State) -> None:
        await state.put_node(node(), 0.05)
        await state.put_instance(instance(), 1)

        async def vanished() -> bool:
            snapshot = await state.snapshot()
            return snapshot.nodes == () and snapshot.instances == ()

        await until(vanished)
        cursor = (await state.snapshot()).cursor
        await state.put_node(node(), 60)
        assert (await state.snapshot()).instances == (instance(),)
        assert await after(state, cursor, 2) == [
            NodeUp(record=node(), ttl_s=60),
            InstanceChanged(record=instance()),
        ]

    run(scenario)


def test_a_final_instance_is_deleted_and_announced(run):
    async def scenario(state: State) -> None:
        await state.put_node(node(), 60)
        await state.put_instance(instance(), 1)
        cursor = (await state.snapshot()).cursor
        final = instance(state=InstanceState.FAILED, error="out of memory")
        await state.put_instance(final, 1)
        assert (await state.snapshot()).instances == ()
        assert await after(state, cursor, 1) == [InstanceChanged(record=final)]

    run(scenario)


def test_demand_of_a_silent_gateway_vanishes(run):
    async def scenario(state: State) -> None:
        await state.put_demand("g", [], 0.05)

        async def vanished() -> bool:
            return (await state.snapshot()).demands == ()

        await until(vanished)

    run(scenario)


def test_demand_replaces_what_the_gateway_said_before(run):
    async def scenario(state: State) -> None:
        one = Demand(gateway="g", function="tiny", version=1, in_flight=1, held=0)
        cursor = (await state.snapshot()).cursor
        await state.put_demand("g", [one], 60)
        await state.put_demand("g", [], 60)
        assert [change.demands for change in (await state.snapshot()).demands] == [()]
        assert await after(state, cursor, 2) == [
            DemandChanged(gateway="g", demands=(one,), ttl_s=60),
            DemandChanged(gateway="g", demands=(), ttl_s=60),
        ]

    run(scenario)


def test_a_wish_is_announced_once_a_token(run):
    async def scenario(state: State) -> None:
        cursor = (await state.snapshot()).cursor
        wishes = [
            ScaleTarget(function="tiny", instances=count, token=token)
            for count, token in ((1, "a"), (1, "a"), (2, "b"), (3, ""), (3, ""))
        ]
        for wish in wishes:
            await state.ask_scale(wish)
        changes = await after(state, cursor, 4)
        assert [change.target.instances for change in changes] == [1, 2, 3, 3]  # type: ignore[union-attr]

    run(scenario)


def test_a_lease_has_one_holder_and_a_growing_epoch(run):
    async def scenario(state: State) -> None:
        first = await state.acquire_lease("controller", "a", 60)
        assert first is not None
        assert await state.acquire_lease("controller", "b", 60) is None
        assert await state.acquire_lease("controller", "a", 60) == first
        await state.release_lease("controller", "b")  # not the holder: nothing happens
        assert await state.acquire_lease("controller", "b", 60) is None
        await state.release_lease("controller", "a")
        second = await state.acquire_lease("controller", "b", 60)
        assert second is not None and second > first
        assert await state.acquire_lease("other", "b", 60) == 1

    run(scenario)


def test_one_of_many_gets_the_lease(run):
    async def scenario(state: State) -> None:
        tries = [state.acquire_lease("controller", f"g{index}", 60) for index in range(50)]
        assert sorted(await asyncio.gather(*tries), key=str) == [1, *[None] * 49]

    run(scenario)


def test_a_lease_runs_out(run):
    async def scenario(state: State) -> None:
        first = await state.acquire_lease("controller", "a", 0.05)
        got: list[int] = []

        async def taken() -> bool:
            epoch = await state.acquire_lease("controller", "b", 60)
            got.extend([] if epoch is None else [epoch])
            return epoch is not None

        await until(taken)
        assert first is not None and got[0] > first
        assert await state.acquire_lease("controller", "a", 60) is None

    run(scenario)


def test_keys_are_stored_listed_and_revoked(run):
    async def scenario(state: State) -> None:
        key = new_api_key("acme", Role.CALLER, "ci", functions=["tiny"], expires_at=5.0).key
        other = new_api_key("acme", Role.ADMIN, "ops").key
        await state.put_key(key)
        await state.put_key(other)
        assert await state.key(key.id) == key
        assert await state.keys() == sorted([key, other], key=lambda one: (one.created_at, one.id))
        await state.put_key(replace(key, revoked_at=1.0))
        assert (await state.key(key.id)).revoked_at == 1.0
        with pytest.raises(NotFound):
            await state.key("none")

    run(scenario)
