"""Redis with replicas and a sentinel: a failover under load loses nothing acknowledged, restarts nothing."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from registry import keys
from registry.errors import StateUnavailable
from registry.redis.sentinel import parse_sentinel_url
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.plain_redis import PlainRedis, Sentinel
from tests.fixtures.platform import Platform
from tests.fixtures.registry_records import request
from tests.fixtures.state import connected

ENOUGH = 30  # records before and after the failover


@dataclass(frozen=True)
class Watched:
    """A master, its replicas and its sentinel."""

    master: PlainRedis
    replicas: tuple[PlainRedis, ...]
    sentinel: Sentinel

    @property
    def promoted(self) -> PlainRedis:
        (found,) = (one for one in self.replicas if one.port == self.sentinel.master_port())
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        instantly = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
        master = stack.enter_context(PlainRedis(tmp_path / "master", *instantly))
        source = ("--replicaof", "127.0.0.1", str(master.port))
        replicas = [
            stack.enter_context(PlainRedis(tmp_path / name, *source, *instantly)) for name in ("r1", "r2")
        ]
        sentinel = stack.enter_context(Sentinel(tmp_path / "sentinel", master))
        deadline = time.monotonic() + PATIENCE_S
        while sentinel.replicas() < 2:
            assert time.monotonic() < deadline, "the sentinel did not find the replicas"
            time.sleep(0.05)
        yield Watched(master, tuple(replicas), sentinel)


def test_urls_of_sentinels() -> None:
    assert parse_sentinel_url("redis+sentinel://:p%40w@a:1,b/main/3") == {
        "sentinels": (("a", 1), ("b", 26379)),
        "master": "main",
        "db": 3,
        "password": "p@w",
    }
    for wrong in ("redis+sentinel://a:1", "redis+sentinel:///main", "redis+sentinel://a/m/x"):
        with pytest.raises(ValueError):
            parse_sentinel_url(wrong)


async def test_a_record_that_no_replica_has_is_not_acknowledged(watched: Watched) -> None:
    url = watched.sentinel.url
    async with RedisState.connect(url) as state, RedisState.connect(url, wait_replicas=1) as careful:
        assert await careful.add_request(request("both"))
        for replica in watched.replicas:
            replica.pause()
        assert await state.add_request(request("alone"))  # and lost if the master dies now
        with pytest.raises(StateUnavailable, match="0 replicas"):
            await careful.add_request(request("careful"))
        with pytest.raises(StateUnavailable, match="0 replicas"):
            await careful.add_request(request("careful"))  # there already, and still not replicated
        for replica in watched.replicas:
            replica.resume()
        await connected(careful)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert not await careful.add_request(request("careful"))
                    break
                except StateUnavailable:
                    pass


async def test_no_acknowledged_record_is_lost_when_the_master_is_killed(watched: Watched) -> None:
    acknowledged: list[str] = []
    async with RedisState.connect(watched.sentinel.url, wait_replicas=2) as state:
        for number in range(ENOUGH):
            acknowledged.append(f"before-{number}")
            await state.add_request(request(acknowledged[-1]))
    async with RedisState.connect(watched.sentinel.url, wait_replicas=1) as state:

        async def write(writer: int) -> None:
            number = 0
            while len(acknowledged) < 10 * ENOUGH:
                number += 1
                try:
                    await state.add_request(request(f"{writer}-{number}"))
                except StateUnavailable:
                    await asyncio.sleep(0.02)
                else:
                    acknowledged.append(f"{writer}-{number}")

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for writer in range(4):
                group.create_task(write(writer))
            await until(lambda: len(acknowledged) > 3 * ENOUGH)
            watched.master.kill()
        assert watched.promoted.call("ROLE")[0] == b"master"
        stored = {one.request_id for one in (await state.requests(UsageFilter(), limit=10_000))[0]}
        assert set(acknowledged) <= stored
        (row,) = await state.report(UsageFilter())
        assert row.requests == len(stored)


def test_a_platform_serves_on_after_a_failover(watched: Watched, tmp_path: Path) -> None:
    waits = ("--redis-url", watched.sentinel.url, "--redis-wait-replicas", "1")
    platform = Platform(data=tmp_path / "data", flags=("--nodes", "1", "--device", "cpu", *waits))
    platform.up()
    try:
        platform.run("deploy", "builtin:echo", "--name", "echo")
        calls = Calls(platform)
        with calls:
            platform.until("calls are answered", lambda: len(calls.answered) > ENOUGH)
            watched.master.kill()
            platform.until(
                "the replica is promoted", lambda: watched.sentinel.master_port() != watched.master.port
            )
            seen = len(calls.answered)
            platform.until("calls are answered again", lambda: len(calls.answered) > seen + ENOUGH)
        platform.run("deploy", "builtin:echo", "--name", "later")
        lost = [one for one in calls.answered if not watched.promoted.call("HEXISTS", keys.REQUESTS, one)]
        assert lost == []
    finally:
        platform.down()


class Calls:
    """Calls one after another in a thread; `answered` has the ids of those with status 200."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.answered: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._platform.http() as http:
            while not self._stop.is_set():
                try:
                    response = http.post("/functions/echo/invoke", json={"n": 1})
                except httpx2.TransportError:
                    continue
                if response.status_code == 200:
                    self.answered.append(response.headers["x-request-id"])

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
