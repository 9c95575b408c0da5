"""A benchmark that receives SIGTERM cleans up first."""

import signal
import subprocess
import sys

from tests.fixtures.patience import PATIENCE_S

WAITING = """
import asyncio, uvloop
from benchmarks.harness.processes import exit_on_sigterm

async def main():
    try:
        print("waiting", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleaned", flush=True)

exit_on_sigterm()
uvloop.run(main())
"""


def test_sigterm_ends_it_as_ctrl_c_does() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert output == "cleaned\n"
    assert process.returncode not in (0, -signal.SIGTERM)
