"""What every State promises, asked of the one in Redis and of the one in memory."""

import asyncio
from dataclasses import replace

import pytest

from registry.codec import decode
from registry.config.secrets import new_api_key
from registry.errors import InvalidRecord, NewerSchema, NotFound
from registry.records.api_key import KeyRole
from registry.records.change import (
    Change,
    FunctionDeleted,
    InstanceChanged,
    NodeUp,
    ScaleRequested,
    ScaleTarget,
    VersionLoad,
)
from registry.records.function import Scaling, ScalingMode
from registry.records.scaling import ScalingInputs, ScalingRecord
from registry.records.schema import SCHEMA
from registry.state import ClusterConfig, State
from tests.fixtures.registry_records import draft, instance, node
from tests.fixtures.state import FEED_LENGTH, after


async def test_the_cluster_is_configured_once(state: State):
    with pytest.raises(NotFound):
        await state.cluster_config()
    first = ClusterConfig(cluster_id="c1", store_url="file:///s")
    assert await state.cluster_config(first) == first
    assert await state.cluster_config(replace(first, cluster_id="c2")) == first
    assert await state.cluster_config() == first


async def test_the_records_of_a_later_release_are_refused(state: State):
    first = ClusterConfig(cluster_id="c1", store_url="file:///s", schema=SCHEMA)
    assert await state.cluster_config(first) == first
    later = replace(first, schema=SCHEMA + 1)
    with pytest.raises(NewerSchema, match=f"schema {SCHEMA + 1}.*upgrade this process"):
        await state.cluster_config(later)  # what the first gateway of that release does
    with pytest.raises(NewerSchema):
        await state.cluster_config()
    with pytest.raises(NewerSchema):
        await state.cluster_config(first)


async def test_versions_are_numbered_and_roll_back(state: State):
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
    missing = state.set_current("tiny", 3), state.version("tiny", 3), state.version("other")
    for asked in (*missing, state.versions("other"), state.set_scaling("other", Scaling())):
        with pytest.raises(NotFound):
            await asked
    with pytest.raises(InvalidRecord):
        await state.create_version(draft("Bad Name"), None)


async def test_an_equal_draft_makes_no_version_but_takes_its_scaling(state: State):
    one = await state.create_version(draft(), None)
    cursor = (await state.snapshot()).cursor
    again = await state.create_version(draft(created_at=5.0), Scaling(keep_alive_s=3))
    assert again == one
    assert (await state.function("tiny")).scaling.keep_alive_s == 3
    await state.create_version(draft(), None)  # changes nothing, so it is not in the feed
    await state.create_version(draft("second"), None)
    changes = await after(state, cursor, 2)
    assert [change.function.name for change in changes] == ["tiny", "second"]  # type: ignore[union-attr]


async def test_concurrent_deploys_of_one_name_get_different_numbers(state: State):
    drafts = [draft(image=f"{index:064x}") for index in range(20)]
    versions = await asyncio.gather(*(state.create_version(one, None) for one in drafts))
    assert sorted(version.version for version in versions) == list(range(1, 21))
    assert (await state.function("tiny")).versions == tuple(range(1, 21))


async def test_a_deleted_function_is_gone_and_its_numbers_stay_used(state: State):
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


async def test_snapshot_holds_everything_and_its_cursor_is_where_the_feed_goes_on(state: State):
    version = await state.create_version(draft(), None)
    await state.put_node(node(), 60)
    await state.put_instance(instance(), 1)
    demand = VersionLoad(function="tiny", version=1, in_flight=2, held=1)
    await state.put_load_report("g", [demand], 60)
    snapshot = await state.snapshot()
    assert snapshot.versions == (version,)
    assert [head.name for head in snapshot.functions] == ["tiny"]
    assert [up.record for up in snapshot.nodes] == [node()]
    assert 0 < snapshot.nodes[0].ttl_s <= 60
    assert snapshot.instances == (instance(),)
    assert snapshot.load_reports[0].loads == (demand,)
    assert 0 < snapshot.load_reports[0].ttl_s <= 60
    assert snapshot.scale_requests == ()
    wish = ScaleTarget(function="tiny", instances=2, on=("n0",), token="t")
    await state.request_scale(wish)
    assert await after(state, snapshot.cursor, 1) == [ScaleRequested(target=wish)]


async def test_the_feed_is_in_order_and_resumes_at_any_cursor(state: State):
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


async def test_a_watcher_gets_changes_as_they_happen(state: State):
    cursor = (await state.snapshot()).cursor
    waiting = asyncio.create_task(after(state, cursor, 1))
    await asyncio.sleep(0)
    await state.put_node(node(), 60)
    assert await waiting == [NodeUp(record=node(), ttl_s=60)]


async def test_watchers_do_not_disturb_each_other(state: State):
    cursor = (await state.snapshot()).cursor
    watchers = [asyncio.create_task(after(state, cursor, 5)) for _ in range(20)]
    for index in range(5):
        await state.put_instance(instance(f"i{index}"), 1)
    results = await asyncio.gather(*watchers)
    assert all(result == results[0] for result in results)


async def test_a_cursor_that_the_feed_left_behind_is_refused(state: State):
    cursor = (await state.snapshot()).cursor
    for _ in range(3 * FEED_LENGTH):
        await state.put_load_report("g", [], 60)
    for bad in (cursor, "no such cursor", ""):
        with pytest.raises(NotFound):
            await after(state, bad, 1)


async def test_keys_are_stored_listed_and_revoked(state: State):
    key = new_api_key("acme", KeyRole.CALLER, "ci", functions=["tiny"], expires_at=5.0).key
    other = new_api_key("acme", KeyRole.ADMIN, "ops").key
    await state.put_key(key)
    await state.put_key(other)
    assert await state.key(key.id) == key
    assert await state.keys() == sorted([key, other], key=lambda one: (one.created_at, one.id))
    await state.put_key(replace(key, revoked_at=1.0))
    assert (await state.key(key.id)).revoked_at == 1.0
    with pytest.raises(NotFound):
        await state.key("none")


async def test_the_last_scaling_decision_of_a_function_is_kept(state: State):
    inputs = ScalingInputs(in_flight=3, held=2, ready=1, starting=0, queued_prompt_tokens=900)
    record = ScalingRecord(
        function="tiny",
        version=1,
        policy=ScalingMode.LOAD,
        desired=2,
        reason="900 tokens wait",
        at=7.0,
        inputs=inputs,
    )
    assert await state.scaling_record("tiny") is None
    await state.put_scaling_record(record)
    later = replace(record, desired=1, at=9.0)
    await state.put_scaling_record(replace(record, function="other"))
    await state.put_scaling_record(later)
    assert await state.scaling_record("tiny") == later


def test_load_reports_and_settings_of_an_earlier_release_are_read():
    """What it lacks has a default that means unknown; what it stored scales as it did."""
    load = decode(VersionLoad, b'{"function":"f","version":1,"in_flight":2,"held":1}', "k")
    assert (load.held_tokens, load.arrived_calls, load.service_s) == (0, 0, None)
    scaling = decode(Scaling, b'{"target_concurrency":4}', "k")
    assert scaling.policy is ScalingMode.CONCURRENCY
