"""The embedded Redis: found, configured, distinguished from a broken one."""

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.errors import StateUnavailable
from registry.redis.embedded import MAX_SOCKET_PATH_BYTES, EmbeddedRedis, find_redis_server, redis_version
from registry.redis.state import RedisState
from tests.fixtures.redis import RedisServer
from tests.fixtures.registry_records import draft


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a folder whose path leaves room for a socket's, however pytest is run."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


async def test_it_runs_on_a_private_socket_in_a_folder_of_any_name(short_path: Path):
    folder = short_path / '50% "quoted"? #1 folder'
    async with RedisServer(folder) as server, RedisState.connect(server.url) as state:
        await state.ping()
        assert server.embedded.socket_path == folder / "state" / "redis.sock"
        mode = server.embedded.socket_path.stat().st_mode
        assert stat.S_IMODE(mode) == 0o700
        assert server.embedded.is_running()
        with pytest.raises(StateUnavailable, match="already"):
            EmbeddedRedis(folder / "state").prepare()
        assert "ready to accept connections" in server.embedded.log_path.read_text().lower()
    assert not server.embedded.is_running()


async def test_a_socket_path_too_long_moves_to_a_private_short_one(
    tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runtime = short_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    deep = tmp_path / ("d" * 100)
    async with RedisServer(deep) as server:
        async with RedisState.connect(server.url) as state:
            await state.ping()
        path = server.embedded.socket_path
        assert path.parent.parent == runtime
        assert len(str(path)) <= MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert EmbeddedRedis(deep / "state").socket_path == path
    path.parent.chmod(0o755)
    with pytest.raises(StateUnavailable, match="accessible to others"):
        EmbeddedRedis(deep / "state").prepare()


def test_no_path_short_enough_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("r" * 100)))
    with pytest.raises(StateUnavailable, match="no path is short enough"):
        EmbeddedRedis(tmp_path / ("d" * 100))


async def test_a_truncated_log_of_commands_loads_up_to_the_cut(tmp_path: Path):
    async with RedisServer(tmp_path) as server, RedisState.connect(server.url) as state:
        await state.create_version(draft(), None)
        await state.create_version(draft("second"), None)
        await server.kill()
        (log,) = [path for path in (tmp_path / "state" / "redis").rglob("*.aof") if path.stat().st_size]
        log.write_bytes(log.read_bytes()[:-7])
        await server.start()
        assert [head.name for head in await state.functions()] == ["tiny"]


async def test_a_redis_that_does_not_start_shows_its_log(tmp_path: Path):
    embedded = EmbeddedRedis(tmp_path)
    embedded.prepare()
    embedded.log_path.write_text("out of luck\n")
    with pytest.raises(StateUnavailable, match="out of luck"):
        await embedded.wait_ready(0.05)


def test_the_server_on_the_path_is_preferred_unless_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    script(tmp_path / "redis-server", "echo 'Redis server v=7.2.4 sha=0 bits=64'")
    assert find_redis_server() == tmp_path / "redis-server"
    script(tmp_path / "redis-server", "echo 'Redis server v=5.0.14 sha=0 bits=64'")
    bundled = find_redis_server()
    assert bundled != tmp_path / "redis-server"
    assert redis_version(bundled) >= (6,)


def test_versions_are_read_from_what_the_program_tells(tmp_path: Path):
    assert redis_version(script(tmp_path / "a", "echo 'Redis server v=6.2.14 sha=0'")) == (6, 2, 14)
    assert redis_version(script(tmp_path / "b", "echo nothing")) == ()
    assert redis_version(tmp_path / "missing") == ()


def test_the_configuration_says_how_durable_it_is(tmp_path: Path):
    embedded = EmbeddedRedis(tmp_path, appendfsync="always", max_memory_bytes=64 << 20)
    embedded.prepare()
    _, config = embedded.command()
    text = Path(config).read_text()
    assert "maxmemory 67108864\nmaxmemory-policy noeviction\n" in text
    for line in ("appendonly yes", "appendfsync always", "port 0", 'save ""', "unixsocketperm 700"):
        assert f"{line}\n" in text
