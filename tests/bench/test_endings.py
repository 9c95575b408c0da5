"""A benchmark that is asked to end cleans up first."""

import signal
import subprocess
import sys

from tests.patience import PATIENCE_S

WAITING = """
import asyncio, uvloop
from benchmarks.endings import end_politely

async def main():
    try:
        print("waiting", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleaned", flush=True)

end_politely()
uvloop.run(main())
"""


def test_sigterm_ends_it_as_ctrl_c_does() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.terminate()
        told, _ = process.communicate(timeout=PATIENCE_S)
    assert told == "cleaned\n"
    assert process.returncode not in (0, -signal.SIGTERM)
