"""RedisState when Redis restarts, hangs, holds rubbish, or a caller leaves in the middle."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry import keys
from registry.errors import InvalidRecord, NotFound, StateUnavailable
from registry.records.change import Change
from registry.redis.connections import ConnectionPool
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.redis import RedisServer, running_redis
from tests.fixtures.registry_records import draft, instance, node, request
from tests.fixtures.state import connected


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def test_acknowledged_records_survive_a_killed_redis(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        await state.create_version(draft(), None)
        epoch = await state.acquire_lease("controller", "a", 60)
        cursor = (await state.snapshot()).cursor
        acknowledged = []

        async def write() -> None:
            for index in range(100_000):
                try:
                    await state.add_request(request(f"r{index}"))
                except StateUnavailable:
                    return
                acknowledged.append(index)
                if index == 50:
                    enough.set()

        enough = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            await enough.wait()
            await server.kill()
        await server.start()
        (row,) = await state.report(UsageFilter())
        # One more may have been written whose acknowledgement was lost.
        assert len(acknowledged) <= row.requests <= len(acknowledged) + 1
        listed, _ = await state.requests(UsageFilter(), limit=200_000)
        assert len(listed) == row.requests
        assert (await state.function("tiny")).current == 1
        assert await state.acquire_lease("controller", "a", 60) == epoch
        await state.put_load_report("g", [], 60)
        assert (await state.snapshot()).cursor > cursor


async def test_a_watcher_hears_of_a_killed_redis_and_resumes_where_it_was(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        cursor = (await state.snapshot()).cursor
        await state.put_instance(instance("i0"), 1)
        seen: list[Change] = []
        with pytest.raises(StateUnavailable):
            async for at, change in state.watch(cursor):
                cursor = at
                seen.append(change)
                await server.kill()
        await server.start()
        await state.put_instance(instance("i1"), 1)
        feed = state.watch(cursor)
        _, change = await anext(feed)
        await feed.aclose()  # type: ignore[attr-defined]
        assert [c.record.instance_id for c in (*seen, change)] == ["i0", "i1"]  # type: ignore[union-attr]


async def test_a_watcher_of_a_feed_that_was_lost_takes_a_new_snapshot(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        cursor = (await state.snapshot()).cursor
        await server.kill()
        for file in (tmp_path / "state" / "redis").glob("append*"):
            file.unlink()
        await server.start()
        await state.put_instance(instance("other history"), 1)
        with pytest.raises(NotFound):
            await anext(state.watch(cursor))


async def test_idle_connections_outlive_a_restart(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        await asyncio.gather(*(state.ping() for _ in range(10)))
        await server.stop()
        await server.start()
        await state.ping()  # the first try finds a dead connection, the next one a new one
        await state.put_node(node(), 60)  # and scripts have to be sent again
        await server.stop()
        with pytest.raises(StateUnavailable):
            await state.ping()


async def test_a_connection_that_cannot_be_made_costs_no_open_one(tmp_path: Path):
    async with RedisServer(tmp_path) as server:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
            address = listener.getsockname()
            url = f"redis://:{server.password}@{address[0]}:{address[1]}"
            passing = asyncio.create_task(pass_one_on(listener, server.embedded.socket_path))
            async with RedisState.connect(url, timeout_s=1) as state:
                await state.ping()
                with socket.create_connection(address):  # the backlog is full: no further one is established
                    two = await asyncio.gather(state.ping(), state.ping(), return_exceptions=True)
                    assert sorted(map(type, two), key=str) == [type(None), StateUnavailable]
                    await state.ping()
            await passing


async def pass_one_on(listener: socket.socket, path: Path) -> None:
    """Accept one connection, and pass on what is sent on it to a socket, and the replies."""
    listener.setblocking(False)
    accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
    ends = await asyncio.open_connection(sock=accepted), await asyncio.open_unix_connection(path)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    await asyncio.gather(copy(ends[0][0], ends[1][1]), copy(ends[1][0], ends[0][1]))


async def test_a_hanging_redis_is_unavailable_not_waited_for(shared: RedisServer):
    async with RedisState.connect(shared.url, timeout_s=1, max_connections=2) as state:
        await connected(state)
        shared.pause()
        try:
            calls = [state.ping() for _ in range(6)]  # more than there are connections
            results = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            shared.resume()
        assert [type(result) for result in results] == [StateUnavailable] * 6
        await connected(state)


async def test_a_command_cancelled_at_any_await_leaves_the_client_usable(shared: RedisServer):
    async with RedisState.connect(shared.url, max_connections=1) as state:
        records = [request(f"c{index}") for index in range(2)]
        for record in records:
            await state.add_request(record)
        for steps in range(25):
            task = asyncio.create_task(state.request("c0"))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            # A half-read connection would answer this with the record asked for before.
            assert await state.request("c1") == records[1]


async def test_a_command_cancelled_while_redis_thinks_leaves_the_client_usable(shared: RedisServer):
    async with RedisState.connect(shared.url, max_connections=2) as state:
        await state.add_request(request("d0"))
        shared.pause()
        try:
            tasks = [asyncio.create_task(state.request("d0")) for _ in range(5)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            shared.resume()
        with pytest.raises(NotFound):
            await state.request("d1")
        assert (await state.request("d0")).request_id == "d0"


async def test_a_cancelled_watcher_leaves_nothing_open(shared: RedisServer):
    async with RedisState.connect(shared.url) as state:
        cursor = (await state.snapshot()).cursor
        watched = asyncio.Event()

        async def watch() -> None:
            async for _ in state.watch(cursor):
                watched.set()

        task = asyncio.create_task(watch())
        await state.put_load_report("g", [], 60)
        await watched.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        connections = ConnectionPool(shared.url)
        open_ones = 3
        while open_ones > 2:  # Redis notices the closed socket in its next round
            open_ones = len((await connections.call("CLIENT", "LIST")).splitlines())
        await connections.aclose()


async def test_rubbish_in_redis_is_named_by_its_key(shared: RedisServer):
    async with RedisState.connect(shared.url) as state:
        connections = ConnectionPool(shared.url)
        await connections.call("HSET", keys.API_KEYS, "bad", b'{"id": 5}')
        with pytest.raises(InvalidRecord, match=r"hc:keys\[bad\] does not hold a ApiKey"):
            await state.key("bad")
        await connections.call("HDEL", keys.API_KEYS, "bad")
        await connections.aclose()


async def test_a_refused_command_says_what_redis_said(shared: RedisServer):
    connections = ConnectionPool(shared.url)
    with pytest.raises(StateUnavailable, match="unknown command"):
        await connections.call("NOSUCH")
    with pytest.raises(StateUnavailable, match="WRONGTYPE"):
        await connections.run(("SET", "s", "1"), ("HGET", "s", "f"), ("GET", "s"))
    assert await connections.call("GET", "s") == b"1"
    await connections.aclose()
    assert "closed" in repr(connections)
    with pytest.raises(StateUnavailable, match="closed"):
        await connections.call("PING")


@pytest.mark.parametrize("url", ["http://x", "unix://", "redis://h?nonsense=1", "redis", "unix://rel.sock"])
def test_a_bad_url_is_refused_at_once(url: str):
    with pytest.raises(InvalidRecord, match="invalid Redis URL"):
        RedisState.connect(url)


async def test_messages_do_not_tell_the_password(unused_port: int):
    url = f"redis://user:hunter2@127.0.0.1:{unused_port}/0"
    async with RedisState.connect(url, timeout_s=1) as state:
        assert "hunter2" not in repr(state)
        with pytest.raises(StateUnavailable) as raised:
            await state.ping()
        assert "hunter2" not in str(raised.value)


@pytest.fixture
def unused_port() -> Iterator[int]:
    """Yield a port without listener: it is bound here, but not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
