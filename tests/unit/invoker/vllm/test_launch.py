"""The program that becomes a server, with its guard."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fixtures.patience import until

pytestmark = pytest.mark.anyio


PROGRAM = """
import pathlib, signal, sys
def end(*_):
    if {ends}:
        pathlib.Path("ended").touch()
        sys.exit(3)
signal.signal(signal.SIGTERM, end)
pathlib.Path("started").touch()
while True:
    signal.pause()
"""


async def launched(folder: Path, *, ends: bool) -> asyncio.subprocess.Process:
    """Start a guard whose program ends on SIGTERM, or goes on; return once it runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "invoker.vllm.launch", str(os.getpid()), str(1 << 30)),
        *(sys.executable, "-c", PROGRAM.format(ends=ends)),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    await until(lambda: (folder / "started").exists())
    return process


async def test_a_server_may_end_by_itself(tmp_path: Path) -> None:
    guard = await launched(tmp_path, ends=True)
    guard.terminate()
    assert await guard.wait() == 3
    assert (tmp_path / "ended").exists()


async def test_a_server_that_does_not_end_is_killed(tmp_path: Path) -> None:
    guard = await launched(tmp_path, ends=False)
    guard.terminate()
    assert await guard.wait() == -signal.SIGKILL
