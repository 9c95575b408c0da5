"""Progress on stderr: a bar on a terminal, a line now and then otherwise."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_EVERY_S = 5.0


class Meter(Protocol):
    """Counts up to a total."""

    def advance(self, amount: int) -> None: ...

    def reach(self, done: int) -> None:
        """Say how much is done in all."""
        ...


class _Bar:
    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total)

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def reach(self, done: int) -> None:
        self._progress.update(self._task, completed=done)


class _Lines:
    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._next_s = time.monotonic() + LINE_EVERY_S

    def advance(self, amount: int) -> None:
        self.reach(self._done + amount)

    def reach(self, done: int) -> None:
        self._done = done
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + LINE_EVERY_S
            note(f"{self._label}: {self._done / max(1, self._total):.0%} of {human_bytes(self._total)}")


@contextmanager
def byte_meter(label: str, total: int) -> Iterator[Meter]:
    """A meter of bytes, shown while the block runs."""
    if not sys.stderr.isatty():
        yield _Lines(label, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, label, total)


class StageLine:
    """A line that says which stage something is in: rewritten in place on a terminal."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._shown = ""

    def show(self, stage: str, fraction: float) -> None:
        text = f"{stage} {fraction:.0%}"
        if self._tty:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        elif stage != self._shown:
            note(stage)
        self._shown = stage

    def end(self) -> None:
        if self._tty and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def note(text: str) -> None:
    """One line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
