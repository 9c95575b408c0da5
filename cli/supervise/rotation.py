"""Rotation of the log files of `up`: a file that has grown is copied, then emptied.

All that writes to it goes on writing: Redis, gateways, nodes, and what these have started. A file is opened
for appending by all of them, so that what follows begins at its start. Of the lines that are written between
the end of the copy and the cut, some microseconds, a part may be lost.
"""

import asyncio
import logging
import os
from pathlib import Path

from rdmacast.aio.threads import run_in_thread

logger = logging.getLogger("hypercast.up")

CHECK_S = 5.0
_COPIED_BYTES = 1 << 20


async def rotate_logs(folder: Path, max_bytes: int, kept: int, *, check_s: float = CHECK_S) -> None:
    """Rotate the logs of a folder that reach `max_bytes`, until cancelled; keep `kept` older files of each.

    A file that cannot be rotated grows on.
    """
    failing: dict[Path, str] = {}
    while True:
        failed = await run_in_thread(_rotate_grown, folder, max_bytes, kept)
        for path, reason in failed.items():
            if failing.get(path) != reason:
                logger.error("%s cannot be rotated: %s", path, reason)
        failing = failed
        await asyncio.sleep(check_s)


def _rotate_grown(folder: Path, max_bytes: int, kept: int) -> dict[Path, str]:
    """Rotate the logs that have grown; return those that could not be, and why."""
    failed = {}
    for path in sorted(folder.glob("*.log")):
        try:
            if path.stat().st_size >= max_bytes:
                rotate(path, kept)
        except OSError as error:
            failed[path] = error.strerror or str(error)
    return failed


def rotate(path: Path, kept: int) -> None:
    """Move the contents of a log to `path.1`, and older files one further; the oldest is deleted.

    Raises OSError; the log is complete then.
    """
    for older, number in _older(path):
        if number >= kept:  # first, for a disk that is full
            older.unlink()
    draft = path.with_name(f".{path.name}.new")
    source = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _copy(source, target)
            for older, number in sorted(_older(path), key=lambda found: -found[1]):
                older.replace(_numbered(path, number + 1))
            draft.replace(_numbered(path, 1))
            _copy(source, target)  # what came meanwhile
            os.ftruncate(source, 0)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(target)
    finally:
        os.close(source)


def _older(path: Path) -> list[tuple[Path, int]]:
    """Return the older files of a log, with their numbers."""
    found = []
    for one in path.parent.glob(f"{path.name}.*"):
        number = one.name.removeprefix(f"{path.name}.")
        if number.isascii() and number.isdecimal():
            found.append((one, int(number)))
    return found


def _copy(source: int, target: int) -> None:
    """Copy what is left of the source."""
    while data := os.read(source, _COPIED_BYTES):
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
