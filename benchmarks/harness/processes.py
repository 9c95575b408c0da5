"""Processes that a benchmark starts and ends again, whatever happens to it."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

from benchmarks.machine import ROOT

_STOP_S = 5.0


class Processes:
    """Owns what it started. Each has a session of its own: Ctrl-C reaches only us, who then end them."""

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
        """Ask a process to end, and see that it does."""
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._running.remove(process)

    def close(self) -> None:
        """Kill what is left. Idempotent."""
        while self._running:
            process = self._running[-1]
            process.kill()
            process.wait()
            self._running.pop()


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs one of our modules."""
    return [sys.executable, "-m", name, *(str(argument) for argument in arguments)]
