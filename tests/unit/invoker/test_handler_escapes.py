"""Attacks of a hostile handler on the node, on Redis, on other processes and on its limits."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from invoker.handlers.confine import DEFAULT_SANDBOX
from invoker.handlers.errors import BadHandler, HandlerCrashed
from invoker.handlers.process import HandlerProcess
from registry.config.handler_spec import HandlerLimits, HandlerSpec
from tests.fixtures.handler import call, started
from tests.fixtures.loops import UVLOOP, Backend
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.redis import RedisServer

MIB = 1024**2

MISSING = DEFAULT_SANDBOX.missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"this machine lacks {'; and '.join(MISSING)}")

ATTEMPT = """
import ctypes, mmap, os, pathlib, resource, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what):
    try:
        return what() or "done"
    except OSError as error:
        return type(error).__name__
def syscall(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""


@pytest.fixture
def anyio_backend() -> Backend:
    return UVLOOP  # as a node runs on


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    """Run another process of the node's user."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_the_environment_does_not_reach_the_loader(tmp_path: Path) -> None:
    source = "import os\ndef handle(request): return os.environ['LD_PRELOAD']"
    logs: list[str] = []
    async with started(tmp_path, source, env={"LD_PRELOAD": "./evil.so"}, logs=logs) as process:
        assert await call(process, None) == ["./evil.so"]
    # The loader reports what it cannot preload.
    assert "evil.so" not in "".join(logs)


async def test_redis_is_out_of_reach(tmp_path: Path) -> None:
    source = (
        ATTEMPT
        + """
def talk(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        folder = os.path.dirname(path).encode()
        for command in (b"CONFIG SET dir " + folder, b"CONFIG SET dbfilename owned", b"SAVE"):
            connection.sendall(command + b"\\r\\n")
            connection.recv(4096)
def datagram(path):
    ours, _ = socket.socketpair(type=socket.SOCK_DGRAM)
    ours.sendto(b"PING", path)
def handle(path):
    return {
        "stream": attempt(lambda: talk(path)),
        "datagram": attempt(lambda: datagram(path)),
        "tcp": attempt(lambda: socket.create_connection(("127.0.0.1", 1), 1)),
        "ring": attempt(lambda: syscall(425, 8, ctypes.create_string_buffer(120))),
        "listing": attempt(lambda: pathlib.Path("/proc/self/net/unix").read_text() and "read"),
    }
"""
    )
    async with RedisServer(tmp_path) as server, started(tmp_path / "handler", source) as process:
        path = server.url.removeprefix("unix://")
        (answer,) = await call(process, path)
        assert set(answer.values()) == {"PermissionError"}  # type: ignore[attr-defined]
        with redis.Redis.from_url(server.url, password=server.password) as client:
            assert client.config_get("dbfilename") != {"dbfilename": "owned"}
        assert not (Path(path).parent / "owned").exists()


async def test_other_processes_are_out_of_reach(tmp_path: Path, bystander: psutil.Process) -> None:
    source = (
        ATTEMPT
        + """
def handle(pid):
    return {
        "files": attempt(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (5, 5))),
        "limits": attempt(lambda: resource.prlimit(pid, resource.RLIMIT_CPU)),
        "priority": attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)),
        "priorities": attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19)),
        "cores": attempt(lambda: os.sched_setaffinity(pid, {0})),
        "policy": attempt(lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))),
        "signal": attempt(lambda: os.kill(pid, 9)),
        "command": attempt(lambda: pathlib.Path(f"/proc/{pid}/cmdline").read_text()),
        "state": attempt(lambda: pathlib.Path(f"/proc/{pid}/status").read_text()),
        "environment": attempt(lambda: pathlib.Path(f"/proc/{pid}/environ").read_text()),
        "memory": attempt(lambda: syscall(310, pid, None, 0, None, 0, 0)),
    }
"""
    )
    before = bystander.nice(), bystander.rlimit(resource.RLIMIT_NOFILE), bystander.cpu_affinity()
    async with started(tmp_path, source) as process:
        (answer,) = await call(process, bystander.pid)
        assert answer == dict.fromkeys(answer, "PermissionError")  # type: ignore[call-overload]
        assert bystander.is_running()
        assert before == (
            bystander.nice(),
            bystander.rlimit(resource.RLIMIT_NOFILE),
            bystander.cpu_affinity(),
        )


async def test_attributes_of_the_users_files_stay(tmp_path: Path) -> None:
    secret = tmp_path / "admin.key"
    secret.touch(0o600)
    source = ATTEMPT + "def handle(path): return attempt(lambda: os.chmod(path, 0o777))"
    async with started(tmp_path / "handler", source) as process:
        await call(process, str(secret))
    assert secret.stat().st_mode & 0o777 == 0o600


async def test_memory_files_are_refused(tmp_path: Path) -> None:
    source = (
        ATTEMPT
        + """
def handle(mib):
    for _ in range(mib):
        os.write(os.memfd_create("hog"), bytes(1 << 20))
    return "done"
"""
    )
    async with started(
        tmp_path, source + "\ndef handle(mib, take=handle): return attempt(lambda: take(mib))"
    ) as p:
        assert await call(p, 128) == ["PermissionError"]


@pytest.mark.parametrize(
    "hog",
    [
        "m = mmap.mmap(-1, 256 << 20); [m.write(bytes(1 << 20)) for _ in range(256)]",  # shared, not private
        "[os.fork() or (bytearray(48 << 20), signal.pause()) for _ in range(5)]",
    ],
)
async def test_memory_counts_in_sum(tmp_path: Path, hog: str) -> None:
    source = ATTEMPT + f"def handle(request):\n    {hog}\n    signal.pause()"
    limits = HandlerLimits(memory_bytes=128 * MIB, timeout_s=PATIENCE_S)
    async with started(tmp_path, source, limits=limits) as process:
        with pytest.raises(HandlerCrashed, match=r"limits\.memory"):
            await call(process, None)


async def test_a_fork_bomb_is_stopped(tmp_path: Path) -> None:
    source = (
        ATTEMPT
        + """
def handle(request):
    if request == "bomb":
        for _ in range(10):
            os.fork()
        signal.pause()
    return "well"
"""
    )
    before = set(psutil.pids())
    limits = HandlerLimits(timeout_s=PATIENCE_S)
    async with started(tmp_path, source, limits=limits) as process:
        with pytest.raises(HandlerCrashed, match=r"limits\.(tasks|memory)"):
            await call(process, "bomb")
        left = [pid for pid in set(psutil.pids()) - before if is_alive(pid)]
        assert len(left) < 50
        assert await call(process, None) == ["well"]


DAEMON = (
    ATTEMPT
    + """
def handle(request):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(writer, str(os.getpid()).encode())
            os.chdir("/")
            os.execve("/bin/sleep", ["sleep", "1000"], {})
        os._exit(0)
    os.wait()
    return int(os.read(reader, 100))
"""
)


async def test_a_daemon_that_detaches_ends_with_its_handler(tmp_path: Path) -> None:
    async with started(tmp_path, DAEMON) as process:
        (pid,) = await call(process, None)
        assert isinstance(pid, int) and is_alive(pid)
    try:
        assert not is_alive(pid)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


NODE = """
import asyncio, sys
from pathlib import Path
from tests.fixtures.handler import call, started
async def main():
    async with started(Path(sys.argv[1]), sys.stdin.read()) as process:
        print(await call(process, None), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_daemon_ends_with_the_node_that_is_killed(tmp_path: Path) -> None:
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NODE, str(tmp_path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert node.stdin is not None and node.stdout is not None
    node.stdin.write(DAEMON.encode())
    node.stdin.close()
    (pid,) = json.loads(await node.stdout.readline())
    assert is_alive(pid)
    node.kill()
    await node.wait()
    try:
        await until(lambda: not is_alive(pid), 10)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


async def test_processor_time_counts_in_sum_and_cannot_be_raised(tmp_path: Path) -> None:
    source = (
        ATTEMPT
        + """
import signal, time
def handle(request):
    signal_ignored = libc.signal(signal.SIGXCPU, 1)
    attempt(lambda: resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2))
    os.fork()
    while time.process_time() < 5: pass
    return "got away"
"""
    )
    async with started(tmp_path, source, limits=HandlerLimits(cpu_s=1, timeout_s=PATIENCE_S)) as process:
        with pytest.raises(HandlerCrashed, match=r"limits\.cpu"):
            await call(process, None)


async def test_a_caller_never_gets_lines_of_another_tenants_call(tmp_path: Path) -> None:
    source = """
import os, sys
def handle(request):
    if request == "crash":
        os._exit(7)
    print("my medical record:", request, flush=True)
    return "well"
"""
    logs: list[str] = []
    async with started(tmp_path, source, logs=logs) as process:
        assert await call(process, "tenant A's") == ["well"]
        with pytest.raises(HandlerCrashed, match="status 7") as raised:
            await call(process, "crash")
        assert "medical" not in str(raised.value)
        assert "my medical record: tenant A's" in logs


async def test_a_start_that_fails_does_not_quote_the_log(tmp_path: Path) -> None:
    logs: list[str] = []
    process = HandlerProcess(logs.append)
    spec = HandlerSpec(file="handler.py", function="handle", env={"TOKEN": "s3cret"})
    source = b"import os\nprint('loading')\nraise ValueError(os.environ['TOKEN'])"
    with pytest.raises(BadHandler, match="ValueError") as raised:
        await process.start({"handler.py": source}, spec, tmp_path)
    assert "s3cret" not in str(raised.value) and "loading" not in str(raised.value)
    assert "loading" in logs and "ValueError: s3cret" in logs
