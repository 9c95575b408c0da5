"""Progress on stderr: a bar on a terminal, occasional lines otherwise."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cli.values import human_bytes

LINE_EVERY_S = 5.0


class Meter(Protocol):
    """Counts up to a total."""

    def advance(self, amount: int) -> None: ...

    def reach(self, done: int) -> None:
        """Set the total done so far."""
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
        note(f"{label} {human_bytes(total)}")

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
    """Show a meter of bytes while the block runs."""
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


@contextmanager
def row_meter(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of rows while the block runs; it gets a function of the rows done and all of them."""
    if not sys.stderr.isatty():
        line = StageLine()
        yield lambda done, total: line.show(label, done / max(1, total))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class StageLine:
    """A line that names the current stage; rewritten in place on a terminal."""

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


@contextmanager
def waiting(text: str | Callable[[], str]) -> Iterator[None]:
    """Show what is waited for while the block runs: the seconds on a terminal, else a line now and then.

    A function returns the text as of now.
    """
    shown = text if callable(text) else lambda: text
    over = threading.Event()
    began_s = time.monotonic()
    tty = sys.stderr.isatty()

    def show() -> None:
        while not over.wait(1.0 if tty else LINE_EVERY_S):
            line = f"{shown()} ({time.monotonic() - began_s:.0f} s)"
            if tty:
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()
            else:
                note(line)

    if tty:
        sys.stderr.write(shown())
        sys.stderr.flush()
    else:
        note(shown())
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if tty:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def note(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
