"""The life of a handler's process: crashes, kills, stops, the next one, and what it leaves behind."""

import asyncio
import os
import signal
from contextlib import aclosing, suppress
from pathlib import Path

import psutil
import pytest

from invoker.handlers.errors import HandlerCrashed, HandlerStopped
from invoker.handlers.process import backoff_s
from tests.fixtures.handler import call, started
from tests.fixtures.loops import UVLOOP, Backend
from tests.fixtures.patience import PATIENCE_S


@pytest.fixture
def anyio_backend() -> Backend:
    return UVLOOP  # as a node runs on


async def test_a_crash_is_reported_without_log_lines_and_the_process_comes_back(tmp_path: Path) -> None:
    source = """
import os
def handle(request):
    if request == "crash":
        print("about to fall over", flush=True)
        os._exit(3)
    return request
"""
    logs: list[str] = []
    async with started(tmp_path, source, logs=logs) as process:
        with pytest.raises(HandlerCrashed) as raised:
            await call(process, "crash")
        assert "status 3" in str(raised.value)
        assert "about to fall over" not in str(raised.value)
        assert await call(process, "fine") == ["fine"]
    assert "about to fall over" in logs


async def test_stopping_ends_calls_in_progress_and_descendants(tmp_path: Path) -> None:
    source = """
import subprocess
def handle(request):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield child.pid
    child.wait()
"""
    pids: list[int] = []
    async with started(tmp_path, source) as process:
        outputs = process.invoke("r", b"", 20)
        pids.append(int((await anext(outputs)).data))
        rest = asyncio.ensure_future(anext(outputs))
        await process.aclose()
        with pytest.raises(HandlerStopped):
            await rest
        with pytest.raises(HandlerStopped):
            await call(process, 1)
    strays = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(strays, timeout=PATIENCE_S)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    "start_child",
    [
        "subprocess.Popen(['sleep', '1000'], start_new_session=True).pid",
        "subprocess.Popen(['sleep', '1000'], env={'HOME': '/'}).pid",
        "os.fork() or signal.pause()",  # it has the socket too, so that the call sees no end of it
    ],
)
async def test_what_a_handler_leaves_behind_when_it_dies_is_killed(tmp_path: Path, start_child: str) -> None:
    source = f"""
import os, signal, subprocess
def handle(request):
    if request == "die":
        os._exit(1)
    return {start_child}
"""
    async with started(tmp_path, source) as process:
        (pid,) = await call(process, None)
        assert isinstance(pid, int)
        stray = psutil.Process(pid)
        with pytest.raises(HandlerCrashed, match="status 1"):
            await call(process, "die")
        await asyncio.to_thread(psutil.wait_procs, [stray], timeout=PATIENCE_S)
        assert not stray.is_running() or stray.status() == psutil.STATUS_ZOMBIE


async def test_a_process_killed_from_outside_is_started_again(tmp_path: Path) -> None:
    source = """
import signal
def handle(request):
    yield request
    if request == "wait":
        signal.pause()
"""
    async with started(tmp_path, source) as process:
        for _ in range(2):
            async with aclosing(process.invoke("r", b'"wait"', 20)) as outputs:
                await anext(outputs)
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises(HandlerCrashed, match="SIGKILL"):
                    await anext(outputs)
            assert await call(process, "x") == ["x"]


def test_backoff_doubles_up_to_a_bound() -> None:
    assert [backoff_s(n) for n in (0, 1, 2, 3, 40)] == [0, 0.1, 0.2, 0.4, 10]


async def test_calls_that_come_while_a_killed_process_is_cleared_away_get_the_next_one(
    tmp_path: Path,
) -> None:
    async with started(tmp_path, "def handle(x): return x") as process:
        first = process.pid
        assert first is not None

        async def insist() -> None:
            while True:
                with suppress(HandlerCrashed):  # it was with the one that is killed
                    assert await call(process, 7) == [7]
                    if process.pid not in (first, None):
                        break

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(insist())
            os.kill(first, signal.SIGKILL)
