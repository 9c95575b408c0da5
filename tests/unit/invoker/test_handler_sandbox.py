"""What a node allows handlers, how it is enforced, and what an ordinary handler still does."""

import asyncio
import errno
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from invoker.base.errors import SettingsError
from invoker.handlers.confine import Sandbox, missing_parts
from invoker.handlers.errors import BadHandler, HandlerCrashed
from invoker.handlers.landlock import TCP_VERSION, landlock_version
from invoker.handlers.process import HandlerProcess
from invoker.handlers.seccomp import program, supports_seccomp
from invoker.settings import check_confinable, parse_settings
from registry.config.handler_spec import HandlerLimits, HandlerSpec
from tests.fixtures.handler import call, started
from tests.fixtures.loops import UVLOOP, Backend
from tests.fixtures.patience import PATIENCE_S

needs_seccomp = pytest.mark.skipif(not supports_seccomp(), reason="this kernel has no seccomp filters")
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000


@pytest.fixture
def anyio_backend() -> Backend:
    return UVLOOP  # as a node runs on


def decide(code: bytes, machine: str, number: int, *arguments: int) -> int:
    """Run a filter as the kernel does; return its action."""
    data = struct.pack("=iIQ6Q", number, AUDIT[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator = place = 0
    while True:
        kind, hit, miss, value = struct.unpack_from("=HBBI", code, 8 * place)
        place += 1
        match kind:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                place += hit if accumulator == value else miss
            case 0x35:
                place += hit if accumulator >= value else miss
            case 0x06:
                return int(value)


REFUSED, IGNORED, ABSENT = (0x50000 | code for code in (errno.EPERM, 0, errno.ENOSYS))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
    ("numbers", "arguments", "action"),
    [
        ((0, 63), (3,), ALLOW),  # read
        ((57, -1), (), ALLOW),  # fork
        ((101, 117), (), REFUSED),  # ptrace
        ((435, 435), (), ABSENT),  # clone3
        ((112, 157), (), IGNORED),  # setsid
        ((56, 220), (0x00000100,), ALLOW),  # clone of a thread
        ((56, 220), (0x10000000,), REFUSED),  # clone into a user namespace
        ((302, 261), (0, 7), ALLOW),  # prlimit64 of itself
        ((302, 261), (42, 7), ALLOW),
        ((302, 261), (43, 7), REFUSED),  # of another
        ((53, 199), (1, 0x80001), ALLOW),  # socketpair of streams, close-on-exec
        ((53, 199), (1, 2), REFUSED),  # of datagrams
        ((72, 25), (3, 1), ALLOW),  # fcntl F_GETFD
        ((72, 25), (3, 8), REFUSED),  # F_SETOWN
        ((141, 140), (0, 0, 5), ALLOW),  # setpriority of itself
        ((141, 140), (2, 0, 5), REFUSED),  # of the user
    ],
)
def test_the_filter_decides(
    machine: str, numbers: tuple[int, int], arguments: tuple[int, ...], action: int
) -> None:
    number = numbers[machine == "aarch64"]
    if number >= 0:
        code = program(machine, pid=42, network=False, landlock=7)
        assert decide(code, machine, number, *arguments) == action


def test_the_filter_opens_tcp_and_udp_but_nothing_else() -> None:
    closed = program("x86_64", pid=42, network=False, landlock=7)
    opened = program("x86_64", pid=42, network=True, landlock=7)
    for arguments in ((2, 1, 0), (10, 0x80801, 6), (2, 2, 17)):
        assert decide(closed, "x86_64", 41, *arguments) == REFUSED
        assert decide(opened, "x86_64", 41, *arguments) == ALLOW
    for arguments in ((1, 1, 0), (16, 3, 0), (17, 3, 0), (2, 3, 0), (2, 1, 262), (40, 1, 0)):
        assert decide(opened, "x86_64", 41, *arguments) == REFUSED
    assert decide(opened, "x86_64", 44, 3, 0, 0, 0x4000) == ALLOW
    assert decide(opened, "x86_64", 44, 3, 0, 0, 0x20000000) == REFUSED


def test_the_filter_closes_the_gaps_of_older_kernels() -> None:
    old = program("x86_64", pid=42, network=False, landlock=2)
    new = program("x86_64", pid=42, network=False, landlock=7)
    for number, arguments, action in (
        (62, (43, 9), REFUSED),
        (62, (0, 15), ALLOW),
        (62, (42, 15), ALLOW),
        (62, ((1 << 64) - 42, 15), ALLOW),
        (62, ((1 << 64) - 1, 15), REFUSED),
        (234, (42, 44, 6), ALLOW),
        (234, (43, 43, 6), REFUSED),
        (424, (3, 9), REFUSED),
        (76, (), REFUSED),
    ):
        assert decide(old, "x86_64", number, *arguments) == action
        assert decide(new, "x86_64", number, *arguments) == ALLOW


def test_the_filter_knows_no_other_architecture() -> None:
    code = program("x86_64", pid=42, network=False, landlock=7)
    assert decide(code, "aarch64", 0) == KILL  # such as 32-bit calls on x86_64
    assert decide(code, "x86_64", 0x40000000) == ABSENT


@needs_seccomp
def test_an_older_kernels_filter_is_loaded() -> None:
    source = """
import os, signal, sys
from invoker.handlers import seccomp
from invoker.handlers.syscalls import prctl
os.setsid()
prctl(38, 1)
seccomp.install(pid=os.getpid(), network=False, landlock=1)
for pid in (int(sys.argv[1]), 1):
    try:
        os.kill(pid, 0)
    except PermissionError:
        print("refused")
signal.signal(signal.SIGUSR1, lambda *_: print("itself"))
signal.raise_signal(signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR1)
"""
    made = subprocess.run(
        [sys.executable, "-c", source, str(os.getpid())], capture_output=True, text=True, check=True
    )
    assert made.stdout.split() == ["refused", "refused", "itself", "itself"]


def test_what_a_kernel_lacks_is_named() -> None:
    assert missing_parts(7, True, needs_tcp=True) == missing_parts(1, True, needs_tcp=False) == []
    (part,) = missing_parts(0, True, needs_tcp=True)
    assert part.startswith("Landlock (Linux 5.13")
    (part,) = missing_parts(3, True, needs_tcp=True)
    assert "rules for TCP" in part
    (part,) = missing_parts(7, False, needs_tcp=False)
    assert "seccomp" in part


def test_a_node_does_not_start_where_handlers_cannot_be_confined() -> None:
    check_confinable([])
    with pytest.raises(SettingsError, match="It lacks Landlock; and filters"):
        check_confinable(["Landlock", "filters"])
    secret = {"HYPERCAST_CLUSTER_SECRET": "x" * 32}
    least = ["--redis-url", "redis://r:7000/0"]
    assert not parse_settings(least, secret).allow_handlers
    if missing := Sandbox().missing():
        with pytest.raises(SettingsError, match=re.escape(missing[0])):
            parse_settings([*least, "--allow-handlers"], secret)
    else:
        assert parse_settings([*least, "--allow-handlers"], secret).allow_handlers
    settings = parse_settings([*least, "--allow-handlers", "--allow-unconfined-handlers"], secret)
    assert settings.sandbox.unconfined and settings.sandbox.redis_port == 7000
    with pytest.raises(SettingsError, match=r"--handler-limits: limits\.ram"):
        parse_settings([*least, "--handler-limits", "ram: 1"], secret)


async def test_limits_above_the_nodes_ceilings_are_refused(tmp_path: Path) -> None:
    process = HandlerProcess(lambda line: None, sandbox=Sandbox(ceilings=HandlerLimits(cpu_s=10)))
    spec = HandlerSpec(file="handler.py", function="handle", limits=HandlerLimits(cpu_s=11))
    with pytest.raises(BadHandler, match=r"limits\.cpu: 11 is above the ceiling of 10 of this node"):
        await process.start({"handler.py": b"def handle(x): return x"}, spec, tmp_path)


@pytest.mark.skipif(landlock_version() < TCP_VERSION, reason="Landlock has rules for TCP from Linux 6.7 on")
async def test_an_open_network_leaves_redis_and_unix_sockets_closed(tmp_path: Path) -> None:
    source = """
import socket
def attempt(connect):
    try:
        return connect() or "done"
    except OSError as error:
        return type(error).__name__
def hello(port):
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        return connection.recv(10).decode()
def fast(port):
    with socket.socket() as connection:
        connection.sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", port))
def handle(ports):
    return {
        "other": attempt(lambda: hello(ports["other"])),
        "redis": attempt(lambda: hello(ports["redis"])),
        "fast": attempt(lambda: fast(ports["redis"])),
        "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
        "packets": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW)),
    }
"""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with (
        await asyncio.start_server(greet, "127.0.0.1", 0) as other,
        await asyncio.start_server(greet, "127.0.0.1", 0) as closed,
    ):
        ports = {name: one.sockets[0].getsockname()[1] for name, one in (("other", other), ("redis", closed))}
        sandbox = Sandbox(network=True, redis_port=ports["redis"])
        async with started(tmp_path, source, sandbox=sandbox) as process:
            (answer,) = await call(process, ports)
    refused = dict.fromkeys(("redis", "fast", "unix", "packets"), "PermissionError")
    assert answer == {"other": "hello", **refused}


async def test_an_ordinary_handler_works(tmp_path: Path) -> None:
    source = """
import asyncio, concurrent.futures, json, pathlib, shutil, subprocess, sqlite3, tempfile, threading
import numpy, psutil, torch
layer = torch.nn.Linear(64, 64)
async def handle(size):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        squares = list(pool.map(lambda x: x * x, range(size)))
    child = subprocess.run(["/bin/sh", "-c", "echo child | cat"], capture_output=True, text=True, check=True)
    quiet = subprocess.Popen(["sleep", "100"], start_new_session=True)
    quiet.terminate()
    pathlib.Path("one.txt").write_text("copied")
    shutil.copy2("one.txt", "two.txt")
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(squares, file)
    with sqlite3.connect("data.db") as base:
        (answer,) = base.execute("select 6 * 7").fetchone()
    process = await asyncio.create_subprocess_exec("true")
    return {
        "squares": squares,
        "child": child.stdout,
        "ended": quiet.wait(30),
        "copy": pathlib.Path("two.txt").read_text(),
        "answer": answer,
        "async": await process.wait(),
        "torch": list(layer(torch.ones(2, 64)).detach().numpy().shape),
        "threads": psutil.Process().num_threads() > 0 and psutil.virtual_memory().total > 0,
    }
"""
    limits = HandlerLimits(memory_bytes=2 << 30, timeout_s=PATIENCE_S)
    async with started(tmp_path, source, limits=limits) as process:
        assert await call(process, 4) == [
            {
                "squares": [0, 1, 4, 9],
                "child": "child\n",
                "ended": -15,
                "copy": "copied",
                "answer": 42,
                "async": 0,
                "torch": [2, 64],
                "threads": True,
            }
        ]


@needs_seccomp
async def test_no_socket_without_the_flag(tmp_path: Path) -> None:
    source = """
import socket
def handle(family):
    try:
        socket.socket(family)
    except PermissionError:
        return "refused"
"""
    async with started(tmp_path, source) as process:
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
            assert await call(process, family) == ["refused"]


async def test_processes_and_threads_count_in_sum(tmp_path: Path) -> None:
    source = """
import signal, subprocess, threading
def handle(request):
    for _ in range(12):
        subprocess.Popen(["sleep", "1000"])
        threading.Thread(target=signal.pause, daemon=True).start()
    signal.pause()
"""
    limits = HandlerLimits(tasks=20, timeout_s=PATIENCE_S)
    async with started(tmp_path, source, limits=limits) as process:
        with pytest.raises(HandlerCrashed, match=r"limits\.tasks \(20 processes and threads\)"):
            await call(process, None)
