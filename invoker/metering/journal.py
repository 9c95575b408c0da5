"""The meter's journal: an append-only file that outlives a node killed with SIGKILL.

One write a frame, into the page cache: no write is waited for, and none is lost with the process. A
file in memory (the default) is lost with the machine. A journal is locked as long as its node lives;
a node that starts adopts every journal of its folder whose node does not.
"""

import fcntl
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from invoker.meter_accounts import Record
from invoker.meter_events import Frame
from invoker.meter_replay import encode_frame, replay

SUFFIX = ".journal"
MIN_ROTATION = 1 << 20
RETRY_S = 1.0
MOST_FAULTS = 100  # of one journal, in the log

log = logging.getLogger("invoker.meter_journal")


@dataclass(frozen=True, slots=True)
class Adopted:
    """A journal that a dead process left, held by this one, and the records that it owes the ledger."""

    path: Path
    fd: int
    records: tuple[Record, ...]


class MeterJournal:
    """`write` and `rotate` are called under the meter's lock, from whichever thread has an event.

    They do not raise: a node serves on when its disk is full, and says so. It then writes nothing more
    until a snapshot fits again, so that what is in the file stays true.
    """

    def __init__(self, folder: Path, node: str, epoch: int) -> None:
        self.path = folder / f"{node}.{epoch}{SUFFIX}"
        self._fd = -1
        self._size = 0
        self._limit = MIN_ROTATION
        self._retry_s = 0.0
        self._failing = True  # until the first snapshot

    def __repr__(self) -> str:
        return f"<MeterJournal {self.path} of {self._size} bytes>"

    @property
    def written(self) -> bool:
        """Whether the file holds what the meter knows."""
        return not self._failing

    def write(self, frame: Frame) -> bool:
        """Append a frame; True if a snapshot is wanted."""
        if self._failing:
            return time.monotonic() >= self._retry_s
        data = encode_frame(frame)
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, self._size)
                raise OSError(f"only {written} of {len(data)} bytes fitted")
        except OSError as error:
            self._fail(error)
            return False
        self._size += written
        return self._size >= self._limit

    def rotate(self, snapshot: Frame) -> None:
        """Replace the file, at once for whoever reads it, by one that holds `snapshot`."""
        if self._failing and time.monotonic() < self._retry_s:
            return
        data = encode_frame(snapshot)
        beside = self.path.with_suffix(".tmp")
        fd = -1
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(beside, flags, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.write(fd, data) < len(data):
                raise OSError("the snapshot did not fit")
            beside.rename(self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            with suppress(OSError):  # the disk that is full, or gone
                beside.unlink(missing_ok=True)
            self._fail(error)
            return
        self._close_fd()
        if self._failing and self._retry_s:
            log.warning("the meter's journal is written again")
        self._fd, self._size, self._failing = fd, len(data), False
        self._limit = max(MIN_ROTATION, 4 * len(data))

    def close(self, *, remove: bool) -> None:
        """Let the journal go; with `remove` there is nothing in it that the ledger does not know."""
        if remove:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
                self.path.parent.rmdir()  # fails while other nodes have theirs there
        self._close_fd()
        self._failing, self._retry_s = True, float("inf")

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fail(self, error: OSError) -> None:
        if not self._failing:
            log.error("the meter's journal %s cannot be written, going on without: %s", self.path, error)
        elif not self._retry_s:
            log.error("the meter's journal %s cannot be made, going on without: %s", self.path, error)
        self._failing, self._retry_s = True, time.monotonic() + RETRY_S


def adopt(folder: Path) -> list[Adopted]:
    """The journals whose process is gone. Two nodes that start together do not get the same one."""
    for path in folder.glob("*.tmp"):
        with suppress(OSError):  # somebody's snapshot in the making, or what is left of one
            fd = _lock(path)
            if fd is not None:
                path.unlink(missing_ok=True)
                os.close(fd)
    adopted = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = _lock(path)
            if fd is None:
                continue
            adopted.append(Adopted(path, fd, _records(path)))
        except OSError as error:
            log.error("the journal %s cannot be read: %s", path, error)
    return adopted


def discard(adopted: list[Adopted], own: MeterJournal) -> None:
    """Remove adopted journals if their records are in the new one; else they wait for the next start."""
    for one in adopted:
        if own.written and one.path != own.path:
            one.path.unlink(missing_ok=True)
        os.close(one.fd)


def _records(path: Path) -> tuple[Record, ...]:
    state = replay(path.read_bytes())
    for fault in state.faults[:MOST_FAULTS]:
        log.error("the journal %s lacks something: %s", path, fault)
    if len(state.faults) > MOST_FAULTS:
        log.error("the journal %s lacks more: %d faults in all", path, len(state.faults))
    records = tuple(state.remains())
    log.info("node %s (epoch %d) died owing the ledger %d records", state.node, state.epoch, len(records))
    return records


def _lock(path: Path) -> int | None:
    """A descriptor that holds the file's lock; None if a process has it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its owner may have put another file in its place since it was opened.
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except BlockingIOError:
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None
