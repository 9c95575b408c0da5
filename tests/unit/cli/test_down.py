"""The end of a platform's supervisor, as `down` waits for it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from cli.commands.down import stop
from tests.fixtures.patience import PATIENCE_S

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
OBEDIENT = "import signal; print(flush=True); signal.pause()"


@contextmanager
def running(code: str) -> Iterator[int]:
    """Yield the pid of a process that nobody reaps until the end."""
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_process_that_its_parent_does_not_reap_has_ended() -> None:
    with running(OBEDIENT) as pid:
        assert stop(pid, PATIENCE_S)
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_one_that_goes_on_has_not() -> None:
    with running(DEAF) as pid:
        assert not stop(pid, 0.1)


def test_one_that_is_gone_has() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert stop(process.pid, 0.1)
