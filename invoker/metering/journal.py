"""The meter's journal: an append-only file that survives the SIGKILL of its node.

Each frame is one write into the page cache, which is not synced, and survives the process. A journal in
memory (the default) is lost with the machine. A journal is locked while its node runs; a starting node
recovers all unlocked journals of its folder.
"""

import fcntl
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from invoker.metering.accounts import LedgerRecord
from invoker.metering.events import JournalFrame
from invoker.metering.replay import encode_frame, replay

SUFFIX = ".journal"
MIN_ROTATION = 1 << 20
RETRY_S = 1.0
MAX_LOGGED_FAULTS = 100  # per journal

log = logging.getLogger("invoker.meter_journal")


@dataclass(frozen=True, slots=True)
class OrphanedJournal:
    """A dead process's journal, locked by this one, and its unsent ledger records."""

    path: Path
    fd: int
    records: tuple[LedgerRecord, ...]


class MeterJournal:
    """The journal file of one meter; called by any thread, under the meter's lock.

    Methods do not raise: with a full disk the node serves on. After an error nothing is written until a
    snapshot succeeds, so that the file stays consistent.
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
    def is_current(self) -> bool:
        """Return whether the file is up to date."""
        return not self._failing

    def write(self, frame: JournalFrame) -> bool:
        """Append a frame; return True if a snapshot is due."""
        if self._failing:
            return time.monotonic() >= self._retry_s
        data = encode_frame(frame)
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, self._size)
                raise OSError(f"only {written} of {len(data)} bytes written")
        except OSError as error:
            self._fail(error)
            return False
        self._size += written
        return self._size >= self._limit

    def rotate(self, snapshot: JournalFrame) -> None:
        """Replace the file atomically by one with `snapshot`."""
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
                raise OSError("short write of the snapshot")
            beside.rename(self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            self._fail(error)
            return
        self._close_fd()
        if self._failing and self._retry_s:
            log.warning("meter journal %s: writable again", self.path)
        self._fd, self._size, self._failing = fd, len(data), False
        self._limit = max(MIN_ROTATION, 4 * len(data))

    def close(self, *, remove: bool) -> None:
        """Close the journal; `remove` it if the ledger has all its records."""
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
            log.error("meter journal %s: cannot write, continuing without: %s", self.path, error)
        elif not self._retry_s:
            log.error("meter journal %s: cannot create, continuing without: %s", self.path, error)
        self._failing, self._retry_s = True, time.monotonic() + RETRY_S


def recover_journals(folder: Path) -> list[OrphanedJournal]:
    """Lock and return the journals of dead processes; concurrent callers get disjoint ones."""
    for path in folder.glob("*.tmp"):
        with suppress(OSError):  # a snapshot in progress, or an orphaned one
            fd = _lock(path)
            if fd is not None:
                path.unlink(missing_ok=True)
                os.close(fd)
    orphans = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = _lock(path)
            if fd is None:
                continue
            orphans.append(OrphanedJournal(path, fd, _records(path)))
        except OSError as error:
            log.error("meter journal %s: cannot read: %s", path, error)
    return orphans


def discard_recovered(orphans: list[OrphanedJournal], own: MeterJournal) -> None:
    """Remove recovered journals if their records are in `own`; else leave them for the next start."""
    for one in orphans:
        if own.is_current and one.path != own.path:
            one.path.unlink(missing_ok=True)
        os.close(one.fd)


def _records(path: Path) -> tuple[LedgerRecord, ...]:
    state = replay(path.read_bytes())
    for fault in state.faults[:MAX_LOGGED_FAULTS]:
        log.error("meter journal %s: damaged: %s", path, fault)
    if len(state.faults) > MAX_LOGGED_FAULTS:
        log.error("meter journal %s: %d faults in all", path, len(state.faults))
    records = tuple(state.unsent_records())
    log.info("recovered %d ledger records of node %s (epoch %d)", len(records), state.node, state.epoch)
    return records


def _lock(path: Path) -> int | None:
    """Lock a file and return its descriptor; None if a process has locked it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its owner may have replaced the file since it was opened.
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except BlockingIOError:
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None
