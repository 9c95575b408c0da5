"""The state of a platform is out of reach of other users, and Redis of whoever has no password."""

import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from benchmarks.harness.local_platform import RunningPlatform
from registry.redis.connections import PASSWORD_FILE
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.plain_redis import PlainRedis
from tests.fixtures.platform import Platform

DENIED = (
    "CONFIG GET dir",
    "CONFIG SET dir /tmp",
    "DEBUG SLEEP 0",
    "MODULE LIST",
    "SAVE",
    "BGSAVE",
    "SHUTDOWN NOSAVE",
    "FLUSHALL",
    "REPLICAOF NO ONE",
    "ACL LIST",
    "MONITOR",
    "KEYS *",
)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    data = tmp_path_factory.mktemp("private") / "data"
    (data / "redis").mkdir(parents=True)
    for folder in (data, data / "redis"):
        folder.chmod(0o755)  # as earlier releases made it
    made = Platform(data=data, flags=("--nodes", "1", "--device", "cpu"))
    made.up()
    try:
        made.run("deploy", "builtin:echo", "--name", "echo")
        yield made
    finally:
        made.down()


def test_the_data_directory_is_its_users_alone(platform: Platform) -> None:
    assert stat.S_IMODE(platform.data.stat().st_mode) == 0o700
    before = {platform.data / "redis"}
    opened = [
        str(path)
        for path in platform.data.rglob("*")
        if path not in before and not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert opened == []


def test_redis_refuses_strangers_and_dangerous_commands(platform: Platform) -> None:
    socket = str(platform.data / "redis.sock")
    with Redis(unix_socket_path=socket, socket_timeout=PATIENCE_S) as stranger:
        with pytest.raises(AuthenticationError):
            stranger.hset("hc:keys", "mine", "{}")
    password = (platform.data / PASSWORD_FILE).read_text()
    with Redis(unix_socket_path=socket, password=password, socket_timeout=PATIENCE_S) as client:
        assert client.hlen("hc:keys") == 1
        for command in DENIED:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.split())


def test_no_process_shows_the_password(platform: Platform) -> None:
    password = (platform.data / PASSWORD_FILE).read_text()
    supervisor = psutil.Process(RunningPlatform.of(platform.data).pid)
    for process in (supervisor, *supervisor.children(recursive=True)):
        assert password not in " ".join(process.cmdline())
        assert password not in str(process.environ())
    assert password not in (platform.data / "redis" / "redis.conf").read_text()
    with platform.http() as http:
        platform.until("it serves", lambda: http.post("/functions/echo/invoke", json=1).status_code == 200)


def test_the_password_of_an_external_redis_is_read_from_a_file(tmp_path: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("long-and-random\n")
    wrong.write_text("guessed\n")
    with PlainRedis(tmp_path / "redis", password="long-and-random") as redis:
        flags = ("--nodes", "1", "--device", "cpu", "--redis-url", redis.url)
        refused = Platform(data=tmp_path / "data", flags=(*flags, "--redis-password-file", str(wrong)))
        up = ("up", "--detach", "--port", "0", "--data-dir", str(refused.data), *refused.flags)
        failed = refused.run(*up, check=False)
        assert failed.returncode and "password" in failed.stderr
        platform = Platform(data=tmp_path / "data", flags=(*flags, "--redis-password-file", str(secret)))
        platform.up()
        try:
            platform.run("deploy", "builtin:echo", "--name", "echo")
        finally:
            platform.down()
