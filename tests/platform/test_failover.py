"""Redis with replicas and a sentinel: a failover under load loses nothing acknowledged, restarts nothing."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.chaos.check import ledger_mismatches, read_ledger
from benchmarks.chaos.load import MODEL, IssuedRequest, RequestFate, TenantClient, request_templates
from benchmarks.harness.processes import ROOT
from registry.accounting.reconciliation import BalanceVerdict
from registry.errors import StateUnavailable
from registry.redis.sentinel import parse_sentinel_url
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.patience import PATIENCE_S, until, until_seen
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
        until_seen("the sentinel has found the replicas", lambda: sentinel.replicas() >= 2)
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
                    await until(lambda: watched.sentinel.master_port() != watched.master.port)
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


STREAMS = 20


async def test_a_platform_streams_on_after_a_failover(watched: Watched, tmp_path: Path) -> None:
    waits = ("--redis-url", watched.sentinel.url, "--redis-wait-replicas", "1")
    flags = ("--nodes", "2", "--device", "cpu", "--meter-interval", "500ms", *waits)
    platform = Platform(data=tmp_path / "data", flags=flags)
    platform.up()
    try:
        platform.run("deploy", str(ROOT / "functions" / "tiny-coder"), "--name", MODEL)
        key = platform.json("keys", "create", "--tenant", "acme", "--name", "streams")["key"]
        before = {name: platform.process(name).pid for name in ("gateway", "node-0", "node-1")}
        streams = Streams(TenantClient(0, platform.url, "acme", key))
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(streams.run(number))
            await until(lambda: streams.finished(RequestFate.ACKNOWLEDGED) > STREAMS)
            assert len(streams.open) > STREAMS / 2
            watched.master.kill()
            await until(lambda: watched.sentinel.master_port() != watched.master.port)
            seen = streams.finished(RequestFate.ACKNOWLEDGED)
            await until(lambda: streams.finished(RequestFate.ACKNOWLEDGED) > seen + 2 * STREAMS)
            streams.over = True
        excused = (RequestFate.ACKNOWLEDGED, RequestFate.REFUSED, RequestFate.FAILED)
        assert [str(one) for one in streams.issued if one.fate not in excused] == []
        codes = {one.code for one in streams.issued if one.fate is RequestFate.FAILED}
        assert codes <= {"billing_failed", "state_unavailable"}
        await asyncio.to_thread(platform.run, "deploy", "builtin:echo", "--name", "later")
        await asyncio.to_thread(platform.run, "invoke", "later", "--data", "{}")
        assert {name: platform.process(name).pid for name in before} == before
    finally:
        platform.down()
    async with RedisState.connect(watched.sentinel.url) as state:
        books = await read_ledger(state)
    assert books.reconcile().verdict is BalanceVerdict.EXACT
    answered = [one for one in streams.issued if one.fate is RequestFate.ACKNOWLEDGED]
    ids = {one.request_id for one in answered}
    assert ledger_mismatches(answered, [one for one in books.records if one.response_id in ids]) == []


class Streams:
    """Clients which read one stream after another; `open` are the ids of those under way."""

    def __init__(self, client: TenantClient) -> None:
        self._client = client
        self._works = [one for one in request_templates(48) if one.name in ("greedy", "seeded")]
        self.issued: list[IssuedRequest] = []
        self.open: set[str] = set()
        self.over = False

    def finished(self, fate: RequestFate) -> int:
        return sum(one.fate is fate for one in self.issued)

    async def run(self, number: int) -> None:
        for turn in itertools.count():
            if self.over:
                return
            request_id, work = f"stream-{number}-{turn}", self._works[(number + turn) % len(self._works)]
            self.open.add(request_id)
            issued, _ = await self._client.ask(request_id, work, PATIENCE_S)
            self.open.discard(request_id)
            self.issued.append(issued)
            if issued.fate is not RequestFate.ACKNOWLEDGED:
                await asyncio.sleep(0.1)
