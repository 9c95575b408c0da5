"""Child processes that end with the benchmark, however it ends."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 5.0
_JOIN_S = 60.0


class Processes:
    """The child processes of a benchmark, each in a session of its own: Ctrl-C reaches only the benchmark."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"Processes({len(self._running)} running)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)
        self._running.append(process)
        return process

    def stop(self, process: subprocess.Popen[Any], patience_s: float = _STOP_S) -> None:
        """Terminate a process, and kill it after `patience_s`."""
        process.terminate()
        self.join(process, patience_s)

    def join(self, process: subprocess.Popen[Any], patience_s: float = _JOIN_S) -> None:
        """Wait for a process that ends by itself, and kill it after `patience_s`."""
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._running.remove(process)

    def close(self) -> None:
        """Kill the remaining processes. Idempotent."""
        while self._running:
            process = self._running[-1]
            process.kill()
            process.wait()
            self._running.pop()


def module(name: str, *arguments: object) -> list[str]:
    """Return the command that runs one of our modules."""
    return [sys.executable, "-m", name, *(str(argument) for argument in arguments)]


def exit_on_sigterm() -> None:
    """Make SIGTERM end this program like Ctrl-C, so that its children and files are cleaned up."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
