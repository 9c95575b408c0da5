"""The scripts of deploy/redis against a real Redis: passwords, a backup, and a restore under a platform."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from benchmarks.harness.local_platform import free_port
from registry.redis.embedded import RULES, find_redis_server
from tests.fixtures.manifests import SCRIPTS
from tests.fixtures.patience import PATIENCE_S, until_seen
from tests.fixtures.platform import Platform

CLIENTS, BACKUP = "c" * 64, "b" * 64


class Deployed:
    """A Redis as deploy/ runs it: started, asked, backed up and restored by the scripts."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.secrets, self.data, self.backups = (folder / name for name in ("secrets", "data", "backups"))
        programs = folder / "bin"
        for path in (self.secrets, self.data, self.backups, programs):
            path.mkdir(parents=True)
        (self.secrets / "redis_password").write_text(CLIENTS + "\n")
        (self.secrets / "backup_password").write_text(BACKUP + "\n")
        server = find_redis_server()
        client = shutil.which("redis-cli", path=f"{server.parent}:{os.environ['PATH']}")
        if client is None:
            pytest.skip("needs redis-cli")
        # redis-check-rdb is the server under another name.
        for name, program in (("redis-server", server), ("redis-check-rdb", server), ("redis-cli", client)):
            (programs / name).symlink_to(program)
        self.environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        self.conf = folder / "redis.conf"
        self._process: subprocess.Popen[bytes] | None = None

    def script(self, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(SCRIPTS / f"{name}.sh"), *map(str, arguments)]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def start(self, *more: str) -> None:
        """Start it and return when ready.sh succeeds."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.data), *more]
        log = ["--logfile", str(self.data / "redis.log"), "--appendonly", "yes"]
        command = ["sh", str(SCRIPTS / "start.sh"), str(self.secrets), str(self.conf), *options, *log]
        self._process = subprocess.Popen(command, env=self.environ)

        def ready() -> bool:
            assert self._process is not None and self._process.poll() is None
            return self.script("ready", self.secrets, "-p", self.port).returncode == 0

        until_seen("Redis is ready", ready)

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(by)
            self._process.wait(PATIENCE_S)
            self._process = None

    def backup(self, keep: int = 3) -> subprocess.CompletedProcess[str]:
        return self.script("backup", self.secrets, self.backups, keep, "-p", self.port)

    def copies(self) -> list[str]:
        return sorted(path.name for path in self.backups.iterdir())

    def client(self, password: str = CLIENTS, user: str = "default") -> Redis:
        return Redis(port=self.port, username=user, password=password, decode_responses=True)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Deployed]:
    deployed = Deployed(tmp_path / "redis")
    deployed.start()
    try:
        yield deployed
    finally:
        deployed.stop()


def test_clients_can_use_it_and_the_backup_can_only_copy(redis: Deployed) -> None:
    with (
        redis.client() as clients,
        redis.client(BACKUP, "backup") as backup,
        Redis(port=redis.port) as stranger,
    ):
        assert clients.set("a", "1")
        for command in (
            "FLUSHALL",
            "CONFIG GET dir",
            "SAVE",
            "SHUTDOWN",
            "DEBUG SLEEP 0",
            "REPLICAOF NO ONE",
        ):
            with pytest.raises(NoPermissionError):
                clients.execute_command(*command.split())
        for command in ("GET a", "SET a 2", "FLUSHALL", "CONFIG GET dir"):
            with pytest.raises(NoPermissionError):
                backup.execute_command(*command.split())
        with pytest.raises(AuthenticationError):
            stranger.get("a")
    assert f"~* {RULES.removeprefix('~* ')}" in redis.conf.read_text()
    command = Path(f"/proc/{_pid(redis)}/cmdline").read_bytes() if Path("/proc").exists() else b""
    assert CLIENTS not in redis.conf.read_text() and CLIENTS.encode() not in command


def _pid(redis: Deployed) -> int:
    with redis.client() as client:
        return int(client.info("server")["process_id"])


def test_it_does_not_start_without_a_password(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path / "redis")
    (deployed.secrets / "redis_password").write_text("")
    started = deployed.script("start", deployed.secrets, deployed.conf, "--port", deployed.port)
    assert started.returncode == 1 and "no password in" in started.stderr and not deployed.conf.exists()


def test_it_keeps_its_data_in_the_append_only_file_alone(redis: Deployed) -> None:
    with redis.client() as client:
        client.set("a", "1")
    redis.stop()
    assert not (redis.data / "dump.rdb").exists()


def test_it_is_alive_but_not_ready_while_its_disk_fails(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path / "redis")
    deployed.start("--save", "1", "1", "--dbfilename", "taken.rdb")
    (deployed.data / "taken.rdb").mkdir()  # which no snapshot can replace
    try:
        with deployed.client() as client:
            client.set("a", "1")
            until_seen(
                "a snapshot failed", lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err"
            )
        assert deployed.script("ready", deployed.secrets, "-p", deployed.port).returncode
        assert not deployed.script("alive", deployed.secrets, "-p", deployed.port).returncode
    finally:
        deployed.stop(signal.SIGKILL)  # it does not end by itself without a snapshot
    assert deployed.script("alive", deployed.secrets, "-p", deployed.port).returncode


def test_the_last_copies_are_kept_and_a_failed_one_leaves_none(redis: Deployed) -> None:
    older = [f"redis-2026010{day}T000000Z.rdb" for day in range(1, 5)]
    for name in older:
        (redis.backups / name).write_bytes(b"REDIS")
    done = redis.backup(keep=3)
    assert done.returncode == 0, done.stderr
    assert redis.copies()[:2] == older[2:] and len(redis.copies()) == 3
    (redis.secrets / "backup_password").write_text("wrong")
    before = redis.copies()
    assert redis.backup(keep=3).returncode != 0
    assert [name for name in redis.copies() if name != ".draft.rdb"] == before


def test_a_damaged_copy_is_refused_before_anything_is_moved(redis: Deployed) -> None:
    with redis.client() as client:
        client.set("a", "1" * 100)
    assert redis.backup().returncode == 0
    redis.stop()
    (copy,) = redis.backups.iterdir()
    copy.write_bytes(copy.read_bytes()[:-20] + b"\0" * 20)
    before = sorted(path.name for path in redis.data.iterdir())
    assert redis.script("restore", redis.backups, redis.data).returncode != 0
    assert sorted(path.name for path in redis.data.iterdir()) == before
    assert redis.script("restore", redis.data / "none", redis.data).returncode == 1


def test_a_platform_serves_again_after_its_redis_was_lost_and_restored(
    tmp_path: Path, redis: Deployed
) -> None:
    password = str(redis.secrets / "redis_password")
    url = f"redis://127.0.0.1:{redis.port}/0"
    flags = ("--nodes", "1", "--device", "cpu", "--redis-url", url, "--redis-password-file", password)
    platform = Platform(data=tmp_path / "data", flags=flags)
    platform.up()
    try:
        platform.run("deploy", "builtin:echo", "--name", "kept")
        with platform.http() as http:

            def answers(name: str) -> bool:
                return http.post(f"/functions/{name}/invoke", json={"n": 1}).status_code == 200

            platform.until("it answers", lambda: answers("kept"))
            assert redis.backup().returncode == 0
            platform.run("deploy", "builtin:echo", "--name", "later")
            redis.stop()
            for path in redis.data.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            restored = redis.script("restore", redis.backups, redis.data)
            assert restored.returncode == 0, restored.stderr
            redis.start()
            platform.until("it answers again", lambda: answers("kept"))
            assert http.post("/functions/later/invoke", json={}).status_code == 404, (
                "deployed after the backup"
            )
            platform.until("others can be deployed", lambda: _deploys(platform))
            platform.until("and answer", lambda: answers("new"))
    finally:
        platform.down()


def _deploys(platform: Platform) -> bool:
    return not platform.run("deploy", "builtin:echo", "--name", "new", check=False).returncode
