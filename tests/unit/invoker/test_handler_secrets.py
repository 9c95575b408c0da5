"""A handler's secrets: in its environment, out of reach of other handlers, and not in what it writes."""

from pathlib import Path

import psutil
import pytest

from invoker.handlers.errors import BadHandler, HandlerRaised
from invoker.handlers.process import HandlerProcess
from invoker.handlers.secret_values import SecretValues
from registry.config.handler_spec import HandlerSpec
from registry.messages.node import StartInstance
from tests.fixtures.handler import SANDBOX, call, started

ENVIRONMENT = "import os\ndef handle(key): return os.environ.get(key)"
KEY = "\n".join(["-----BEGIN KEY-----", *(f"MIIEvQIBADANBgkq{number:04}" for number in range(40)), "--END"])


def read(path: Path | str) -> bytes:
    return Path(path).read_bytes()


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_handler_gets_its_secrets_as_environment(tmp_path: Path) -> None:
    secrets = {"TOKEN": "hunter2-hunter2", "BIG": "x" * 16384, "BIG_2": "y" * 16384, "BIG_3": "z" * 16384}
    async with started(tmp_path, ENVIRONMENT, env={"PLAIN": "1"}, secrets=secrets) as process:
        for key, value in {**secrets, "PLAIN": "1"}.items():
            assert await call(process, key) == [value]
        guard = psutil.Process(process.pid)
        for one in (guard, *guard.children()):
            # What /proc shows of it to other processes of the user.
            assert b"hunter2" not in read(f"/proc/{one.pid}/environ")
            assert "hunter2" not in " ".join(one.cmdline())
        assert not any(b"hunter2" in read(path) for path in files_below(tmp_path))


async def test_a_handler_gets_no_secret_that_it_does_not_name(tmp_path: Path) -> None:
    process = HandlerProcess(lambda line: None, sandbox=SANDBOX)
    spec = HandlerSpec(file="handler.py", function="handle", secrets=("TOKEN",))
    files = {"handler.py": ENVIRONMENT.encode()}
    with pytest.raises(BadHandler, match="no secret TOKEN"):
        await process.start(files, spec, tmp_path, {"OTHER": "value"})
    try:
        await process.start(files, spec, tmp_path, {"TOKEN": "value", "OTHER": "value"})
        assert await call(process, "TOKEN") == ["value"] and await call(process, "OTHER") == [None]
    finally:
        await process.aclose()


async def test_another_handler_cannot_read_them(tmp_path: Path) -> None:
    if SANDBOX.unconfined:
        pytest.skip("this kernel lacks a part of the handler's sandbox")
    # With a child of its own, of which the kernel's copy of the environment has the secret.
    victim = """
import os, subprocess
child = subprocess.Popen(["/bin/sleep", "600"])
def handle(request): return [os.getpid(), child.pid]
"""
    attacker = """
import ctypes, os, pathlib
libc = ctypes.CDLL(None, use_errno=True)
def attempt(work):
    try:
        return repr(work())
    except OSError as error:
        return type(error).__name__
def peek(pid):
    local, remote = (ctypes.c_size_t * 2)(), (ctypes.c_size_t * 2)(1 << 22, 64)
    local[0], local[1] = ctypes.addressof(ctypes.create_string_buffer(64)), 64
    if libc.process_vm_readv(pid, local, 1, remote, 1, 0) < 0:
        raise OSError(ctypes.get_errno(), "")
def trace(pid):
    if libc.ptrace(16, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "")
def handle(pids):
    return [
        attempt(work)
        for pid in pids
        for work in (
            lambda: pathlib.Path(f"/proc/{pid}/environ").read_bytes(),
            lambda: pathlib.Path(f"/proc/{pid}/mem").read_bytes(),
            lambda: os.open(f"/proc/{pid}/task/{pid}/environ", os.O_RDONLY),
            lambda: peek(pid),
            lambda: trace(pid),
        )
    ]
"""
    async with started(tmp_path / "victim", victim, secrets={"TOKEN": "hunter2-hunter2"}) as process:
        ((handler, child),) = await call(process, None)  # type: ignore[misc]
        assert b"hunter2" in read(f"/proc/{child}/environ")
        async with started(tmp_path / "attacker", attacker) as other:
            (answers,) = await call(other, [process.pid, handler, child])
    assert set(answers) == {"PermissionError"}  # type: ignore[call-overload]


async def test_its_log_and_its_errors_show_no_values(tmp_path: Path) -> None:
    source = """
import os, sys
print("starting with", os.environ["TOKEN"], flush=True)
def handle(request):
    print(os.environ["KEY"], file=sys.stderr, flush=True)
    raise ValueError("refused: " + os.environ["TOKEN"])
"""
    logs: list[str] = []
    secrets = {"TOKEN": "hunter2-hunter2", "KEY": KEY}
    async with started(tmp_path, source, secrets=secrets, logs=logs) as process:
        with pytest.raises(HandlerRaised, match=r"refused: \*\*\*") as raised:
            await call(process, None)
    text = "\n".join(logs)
    assert "hunter2" not in str(raised.value) + text and "MIIEvQ" not in text
    assert "starting with ***" in logs and "ValueError: refused: ***" in text


def test_the_longest_value_is_masked_first_and_short_ones_stay() -> None:
    values = SecretValues({"A": "password", "B": "password-and-more", "C": "1"})
    assert values.masked("password-and-more 1 password") == "*** 1 ***"
    assert "password" not in repr(values)


def test_the_message_of_a_start_shows_none() -> None:
    request = StartInstance(
        instance_id="chat-1-abc",
        function="chat",
        version=1,
        task="handler",
        dtype="",
        context_length=0,
        max_concurrency=1,
        assets={},
        secrets={"TOKEN": "hunter2"},
    )
    assert "hunter2" not in repr(request) and "chat-1-abc" in repr(request)
