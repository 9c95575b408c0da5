"""The program that becomes a server, with its guard."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fixtures.patience import until

pytestmark = pytest.mark.anyio


async def launched(folder: Path, on_term: str) -> asyncio.subprocess.Process:
    """Start a guard whose program does this in a shell on SIGTERM; return once it runs."""
    program = f"trap '{on_term}' TERM; sleep infinity & touch started; while :; do wait; done"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "invoker.vllm.launch", str(os.getpid()), str(1 << 30)),
        *("/bin/sh", "-c", program),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    await until(lambda: (folder / "started").exists())
    return process


async def test_a_server_may_end_by_itself(tmp_path: Path) -> None:
    guard = await launched(tmp_path, "touch ended; exit 3")
    guard.terminate()
    assert await guard.wait() == 3
    assert (tmp_path / "ended").exists()


async def test_a_server_that_does_not_end_is_killed(tmp_path: Path) -> None:
    guard = await launched(tmp_path, "")
    guard.terminate()
    assert await guard.wait() == -signal.SIGKILL
