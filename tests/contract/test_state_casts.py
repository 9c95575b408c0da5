"""What every State promises of casts: the latest plan of each, and each node's latest word of it."""

from dataclasses import replace
from typing import Any

import pytest

from rdmacast.cast.record import CastMember
from registry import keys
from registry.clock import FakeClock
from registry.keys import CAST_TTL_S
from registry.memory.state import MemoryState
from registry.records.cast import CastState, CastStatus
from registry.records.change import CastChanged, CastPartEnded
from registry.redis.connections import ConnectionPool
from registry.redis.state import RedisState
from registry.state import State
from tests.fixtures.registry_records import NOW, cast, cast_progress
from tests.fixtures.state import after, expiries


async def test_a_cast_is_told_in_feed_and_snapshot(state: State):
    cursor = (await state.snapshot()).cursor
    first, second = cast(), cast("c1", started_at=NOW + 1)
    await state.put_cast(first)
    await state.put_cast(first)  # changes nothing, so it is not in the feed again
    await state.put_cast(second)
    changes = await after(state, cursor, 2)
    assert changes == [CastChanged(record=first), CastChanged(record=second)]
    assert (await state.snapshot()).casts == (second, first)
    assert await state.casts() == [CastStatus(record=second), CastStatus(record=first)]
    assert await state.casts("c1") == [CastStatus(record=second)]


async def test_nodes_join_a_cast_by_its_next_epoch(state: State):
    first = cast()
    late = CastMember(node="n9", host="h9", address="tcp://127.0.0.1:9")
    joined = replace(first, members=(*first.members, late), epoch=1)
    await state.put_cast(joined)
    await state.put_cast(first)  # of a controller that is behind
    assert [status.record for status in await state.casts()] == [joined]
    assert joined.targets == (first.members[1], first.members[2], late)


async def test_of_each_node_the_latest_word_counts(state: State):
    started = cast_progress(held=0, updated_at=NOW)
    half, whole = cast_progress(), cast_progress(held=4, state=CastState.COMPLETE, updated_at=NOW + 1)
    await state.put_cast_progress(started)  # even before the cast itself is known
    assert await state.casts() == []
    await state.put_cast(cast())
    for reported in (whole, half, cast_progress("n2")):
        await state.put_cast_progress(reported)
    (status,) = await state.casts()
    assert status.progress == (whole, cast_progress("n2"))
    await state.put_cast_progress(replace(started, updated_at=NOW + 2))  # it came back
    (status,) = await state.casts()
    assert status.progress[0].state is CastState.RUNNING


async def test_whatever_is_told_of_a_later_part_follows_what_was_told_of_an_earlier_one(state: State):
    cursor = (await state.snapshot()).cursor
    await state.put_cast(cast())
    whole = cast_progress(held=4, state=CastState.COMPLETE, updated_at=NOW + 9)
    again = cast_progress(state=CastState.FAILED, updated_at=0.0, epoch=1, error="could not begin")
    await state.put_cast_progress(whole)
    await state.put_cast_progress(again)
    await state.put_cast_progress(replace(whole, updated_at=NOW + 99))  # its process is gone by now
    (status,) = await state.casts()
    assert status.progress == (again,)
    assert await after(state, cursor, 3) == [
        CastChanged(record=cast()),
        CastPartEnded(progress=whole),
        CastPartEnded(progress=again),
    ]


async def test_casts_are_found_by_function_and_their_parts_in_brief(state: State):
    ours, other = cast(), cast("c1", function="other", started_at=NOW + 1)
    reported = cast_progress(pulled={"n0": 1 << 19}, error="slow", faults={"late": 1})
    for one in (ours, other):
        await state.put_cast(one)
        await state.put_cast_progress(replace(reported, cast_id=one.cast_id))
    assert await state.casts(function="tiny") == [CastStatus(record=ours, progress=(reported,))]
    assert await state.casts("c1", function="tiny") == await state.casts(function="nobody") == []
    brief = replace(reported, transports={}, pulled={}, error="")
    found = await state.casts(brief=True)
    assert [status.record for status in found] == [other, ours]
    assert found[1].progress == (brief,)
    assert brief.with_details(reported.details) == reported


async def test_no_details_are_read_for_a_summary_and_no_parts_of_other_functions(
    empty_redis_url: str,
) -> None:
    names = [f"n{number}" for number in range(600)]
    members = tuple(CastMember(node=name, host=name, address="tcp://127.0.0.1:1") for name in names)
    transports = {f"n{peer}": "tcp: host 'host-1' is not 'host-2'; no RDMA device" for peer in range(10)}
    connections = ConnectionPool(empty_redis_url)
    async with RedisState.connect(empty_redis_url) as state:
        await state.put_cast(cast(members=members, planned=600))
        for name in names[1:]:
            await state.put_cast_progress(cast_progress(name, transports=transports))

        async def answered_bytes(**asked: Any) -> int:
            before = await sent_bytes(connections)
            await state.casts(**asked)
            return await sent_bytes(connections) - before

        whole = await answered_bytes()
        assert await answered_bytes(brief=True) < whole / 2
        assert await answered_bytes(function="nobody") < whole / 5
        (status,) = await state.casts(brief=True)
        assert [one.node for one in status.progress] == sorted(names[1:])
    await connections.aclose()


async def sent_bytes(connections: ConnectionPool) -> int:
    """Return what Redis sent to all clients so far."""
    info = (await connections.call("INFO", "stats")).decode()
    return int(info.partition("total_net_output_bytes:")[2].split()[0])


async def test_the_feed_tells_the_last_word_of_each_node(state: State):
    cursor = (await state.snapshot()).cursor
    await state.put_cast(cast())
    whole = cast_progress(held=4, state=CastState.COMPLETE, updated_at=NOW + 1)
    failed = cast_progress("n2", state=CastState.FAILED, updated_at=NOW + 2, error="nobody has it")
    for reported in (cast_progress(), whole, failed):
        await state.put_cast_progress(reported)
    await state.put_cast_progress(replace(whole, state=CastState.CANCELLED, updated_at=NOW))  # too late
    await state.put_cast(cast("c1"))
    assert await after(state, cursor, 4) == [
        CastChanged(record=cast()),
        CastPartEnded(progress=whole),
        CastPartEnded(progress=failed),
        CastChanged(record=cast("c1")),
    ]


async def test_a_cast_is_forgotten_in_the_end() -> None:
    clock = FakeClock()
    state = MemoryState(clock=clock)
    await state.put_cast(cast())
    clock.advance(CAST_TTL_S / 2)
    await state.put_cast_progress(cast_progress())
    clock.advance(CAST_TTL_S - 1)
    assert len(await state.casts()) == 1
    clock.advance(1)
    assert await state.casts() == [] and (await state.snapshot()).casts == ()


async def test_a_cast_is_forgotten_by_redis_too(empty_redis_url: str) -> None:
    connections = ConnectionPool(empty_redis_url)
    async with RedisState.connect(empty_redis_url) as state, expiries(empty_redis_url) as lapse:
        await state.put_cast(cast())
        assert 0 < await connections.call("TTL", keys.cast("c0")) <= CAST_TTL_S
        await connections.call("PEXPIRE", keys.cast("c0"), 1)
        await lapse()
        assert await state.casts() == []
        assert (await state.snapshot()).casts == ()
        assert await connections.call("SCARD", keys.CASTS) == 0
    await connections.aclose()


async def test_ids_of_expired_casts_go_though_nobody_asks_for_casts(empty_redis_url: str) -> None:
    connections = ConnectionPool(empty_redis_url)
    async with RedisState.connect(empty_redis_url) as state:
        for number in range(300):
            await state.put_cast(cast(f"c{number}"))
            await connections.call("DEL", keys.cast(f"c{number}"))
        assert await connections.call("SCARD", keys.CASTS) < 30
    await connections.aclose()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sources": ()},
        {"sources": (3,)},
        {"planned": 0},
        {"planned": 4},
        {"planned": 0, "sources": (0,)},
        {"nbytes": 0},
        {"block_bytes": 0},
        {"members": (CastMember(node="n0", host="h0", address="tcp://127.0.0.1:1"),) * 3},
    ],
)
def test_a_cast_that_makes_no_sense_is_no_record(wrong):
    with pytest.raises(ValueError, match="cast c0"):
        cast(**wrong)
