"""Redis loses its state under a running platform, or a later release takes it over: nothing is restarted."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest

from benchmarks.harness.local_platform import RunningPlatform
from registry import keys
from registry.records.schema import BASE_SCHEMA, SCHEMA
from tests.fixtures.plain_redis import PlainRedis
from tests.fixtures.platform import Platform

AHEAD = 50  # controllers that nodes have seen and the lost state has not


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainRedis]:
    with PlainRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, redis: PlainRedis) -> Iterator[Platform]:
    """One platform, which serves again after each loss."""
    flags = ("--nodes", "1", "--device", "cpu", "--redis-url", redis.url)
    made = Platform(data=tmp_path_factory.mktemp("lost") / "data", flags=flags)
    made.up()
    try:
        yield made
    finally:
        made.down()


def pids(platform: Platform) -> set[int]:
    supervisor = psutil.Process(RunningPlatform.of(platform.data).pid)
    return {one.pid for one in supervisor.children(recursive=True)}


def invoked(platform: Platform, name: str) -> bool:
    """Return whether a function answers."""
    with platform.http() as http:
        try:
            return http.post(f"/functions/{name}/invoke", json={"n": 1}).status_code == 200
        except httpx2.TransportError:
            return False


def serve(platform: Platform, name: str) -> None:
    """Deploy a function of which no instance runs, and call it."""

    def deployed() -> bool:
        return not platform.run("deploy", "builtin:echo", "--name", name, check=False).returncode

    platform.until(f"{name} is deployed", deployed)
    platform.until(f"{name} answers", lambda: invoked(platform, name))


def take_over(redis: PlainRedis, epoch: int) -> None:
    """Let the lease of the controller be acquired again, after `epoch`."""
    redis.call("HSET", keys.LEASE_EPOCHS, "controller", epoch)
    redis.call("DEL", keys.lease("controller"))


def advance(platform: Platform, redis: PlainRedis) -> str:
    """Let nodes see a later controller than any that the state will count to; return what they serve."""
    epoch = int(redis.call("HGET", keys.LEASE_EPOCHS, "controller")) + AHEAD
    take_over(redis, epoch)
    platform.until("the lease is held again", lambda: redis.call("EXISTS", keys.lease("controller")))
    serve(platform, f"seen-{epoch}")
    return f"seen-{epoch}"


def test_a_redis_that_is_emptied(platform: Platform, redis: PlainRedis) -> None:
    advance(platform, redis)
    before, config = pids(platform), redis.call("GET", keys.CLUSTER)
    redis.call("FLUSHALL")
    platform.until("the cluster is configured", lambda: redis.call("GET", keys.CLUSTER) == config)
    platform.until("the admin key is known", lambda: redis.call("HLEN", keys.API_KEYS))
    serve(platform, "emptied")
    assert pids(platform) == before
    assert len(platform.nodes()) == 1


def test_a_redis_that_is_restored_from_an_older_backup(
    platform: Platform, redis: PlainRedis, tmp_path: Path
) -> None:
    serve(platform, "old")
    shutil.copytree(redis.folder, tmp_path / "backup")
    advance(platform, redis)
    before = pids(platform)
    redis.kill()
    shutil.rmtree(redis.folder)
    shutil.copytree(tmp_path / "backup", redis.folder)
    redis.start()
    serve(platform, "new")
    platform.until("what the backup has is served", lambda: invoked(platform, "old"))
    assert pids(platform) == before


def test_a_controller_of_which_the_epoch_went_back(platform: Platform, redis: PlainRedis) -> None:
    advance(platform, redis)
    before = pids(platform)
    take_over(redis, 0)
    serve(platform, "back")
    assert pids(platform) == before


def test_gateways_that_start_on_an_older_backup_learn_from_the_nodes(
    platform: Platform, redis: PlainRedis
) -> None:
    seen = advance(platform, redis)
    gateway = platform.process("gateway")
    gateway.kill()
    take_over(redis, 0)  # nothing but the nodes has seen the later ones
    platform.until("another gateway answers", lambda: invoked(platform, seen))
    serve(platform, "restarted")


def test_the_records_of_a_later_release(platform: Platform, redis: PlainRedis, tmp_path: Path) -> None:
    serve(platform, "echo")
    before, config = pids(platform), redis.call("GET", keys.CLUSTER)
    assert msgspec.json.decode(config)["schema"] == BASE_SCHEMA
    later = msgspec.json.encode({**msgspec.json.decode(config), "schema": SCHEMA + 1, "more": "of it"})
    redis.call("SET", keys.CLUSTER, later)
    platform.until("it refuses", lambda: not invoked(platform, "echo"))
    with platform.http() as http:
        refused = http.post("/functions/echo/invoke", json={"n": 1})
    assert refused.status_code == 503 and f"schema {SCHEMA + 1}" in refused.json()["error"]["message"]
    joining = ("--redis-url", redis.url, "--secret-file", str(platform.data / "cluster.secret"))
    for program, *flags in (("gateway", "--store", str(tmp_path / "store"), "--port", "0"), ("invoker",)):
        late = platform.run(program, *flags, *joining, check=False)
        assert late.returncode and "upgrade this process" in late.stderr
    redis.call("SET", keys.CLUSTER, config)
    platform.until("it serves again", lambda: invoked(platform, "echo"))
    assert pids(platform) == before
