"""Redis killed under load, with a full disk, with its clock set back: what was acknowledged stays."""

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from registry import keys
from registry.clock import FakeClock
from registry.errors import StateUnavailable
from registry.records.change import VersionLoad
from registry.redis.connections import ConnectionPool
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.redis import RedisServer
from tests.fixtures.registry_records import instance, node, request

KILLS = 8
WRITERS = 8


@contextmanager
def busy_disk(server: RedisServer, folder: Path) -> Iterator[None]:
    """Force Redis' file to the disk without a pause, beside another file that is written and forced."""
    stop = threading.Event()

    def load() -> None:
        with (folder / "other").open("wb") as other:
            while not stop.is_set():
                other.seek(0)
                other.write(os.urandom(1 << 20))
                other.flush()
                os.fsync(other.fileno())
                server.embedded.fsync()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def test_nothing_acknowledged_is_lost_or_counted_twice_when_redis_is_killed_again_and_again(
    tmp_path: Path,
):
    chance = random.Random(3)
    acknowledged: list[str] = []
    over, another, to_rewrite = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def writer(state: RedisState, index: int) -> None:
        number = 0
        while not over.is_set():
            name = f"w{index}-{number}"
            try:
                await state.add_request(request(name, completion_tokens=1))
            except StateUnavailable:
                continue  # the same one again: whether it is there already is for Redis to say
            acknowledged.append(name)
            another.set()
            to_rewrite.set()
            number += 1

    async def rewriter(state: RedisState) -> None:
        while not over.is_set():
            await to_rewrite.wait()
            to_rewrite.clear()
            try:
                await state.snapshot()
                await state._redis.call("BGREWRITEAOF")
            except StateUnavailable:
                pass  # it is away, or rewrites already

    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        with busy_disk(server, tmp_path):
            async with asyncio.TaskGroup() as group:
                for index in range(WRITERS):
                    group.create_task(writer(state, index))
                group.create_task(rewriter(state))
                for _ in range(KILLS):
                    enough = len(acknowledged) + chance.randrange(1, 60)
                    while len(acknowledged) < enough:
                        another.clear()
                        await another.wait()
                    await server.kill()
                    await server.start()
                over.set()
                to_rewrite.set()
        listed, _ = await state.requests(UsageFilter(), limit=1_000_000)
        names = [record.request_id for record in listed]
        assert len(names) == len(set(names))
        assert set(acknowledged) <= set(names), "acknowledged, and lost"
        (row,) = await state.report(UsageFilter())
        assert row.requests == row.completion_tokens == len(names)
        await server.kill()
        server.embedded.remove_temporary_files()
        assert not list((tmp_path / "state" / "redis").glob("temp-*"))


async def test_a_lease_passes_on_although_the_clock_of_redis_was_set_back(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        first = await state.acquire_lease("controller", "dead", 600)
        assert first is not None
        # What a clock that is set back by an hour does to the keys that expire.
        await state._redis.call("PEXPIRE", keys.lease("controller"), 4_200_000)
        clock = FakeClock()
        async with RedisState(ConnectionPool(server.url), clock=clock) as heir:
            for _ in range(10):
                assert await heir.acquire_lease("controller", "heir", 600) is None
                clock.advance(60)
            fence = await heir.acquire_lease("controller", "heir", 600)
            assert fence == replace(first, epoch=first.epoch + 1)
            async with RedisState(ConnectionPool(server.url), clock=clock) as other:
                for _ in range(20):  # who renews is not taken over
                    assert await other.acquire_lease("controller", "third", 600) is None
                    assert await heir.acquire_lease("controller", "heir", 600) == fence
                    clock.advance(60)


async def test_no_time_to_live_grows_when_the_clock_of_redis_is_set_back(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        await state.put_node(node(), 6)
        demand = VersionLoad(function="f", version=1, held=1, in_flight=0)
        await state.put_load_report("g", [demand], 5)
        for key in (keys.node("n0"), keys.load_report("g")):
            await state._redis.call("PEXPIRE", key, 3_600_000)
        snapshot = await state.snapshot()
        assert snapshot.nodes[0].ttl_s <= 6 and snapshot.load_reports[0].ttl_s <= 5


async def test_a_node_is_asked_for_its_instances_when_their_keys_are_gone(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        assert not await state.put_node(node(), 60)
        await state.put_instance(instance("i0"), 1)
        assert await state.put_node(node(), 60)
        await state._redis.call("DEL", keys.instances("n0"))  # as a clock set ahead by hours does
        assert not await state.put_node(node(), 60)
        assert await state.put_node(node(), 60)


async def test_a_full_disk_refuses_writes_until_there_is_room(small_disk: Path):
    async with RedisServer(small_disk) as server, RedisState.connect(server.url) as state:
        await state.add_request(request("first"))
        (small_disk / "filler").write_bytes(b"0" * (3 << 20))
        written = ["first"]
        with pytest.raises(StateUnavailable, match=r"MISCONF|No space"):
            for index in range(5000):
                await state.add_request(request(f"r{index}"))
                written.append(f"r{index}")
        with pytest.raises(StateUnavailable, match="MISCONF"):
            await state.ping()  # by which a gateway knows that it cannot bill
        (small_disk / "filler").unlink()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await state.ping()
                    break
                except StateUnavailable:
                    await asyncio.sleep(0)
        assert await state.add_request(request("last"))
        await server.kill()
        await server.start()
        listed, _ = await state.requests(UsageFilter(), limit=10_000)
        assert {*written, "last"} <= {record.request_id for record in listed}
