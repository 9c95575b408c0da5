"""The last log lines of a node in a file, which survives the SIGKILL of its process.

The file has a fixed size and is written in a circle, one write into the page cache for each line. It is
locked while its node runs; a starting node recovers the unlocked ones of its folder, and removes them.
"""

import fcntl
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from invoker.log_rings import LoggedLine

SUFFIX = ".lines"
MAX_FILE_BYTES = 1 << 20
MAX_RECOVERED = 8  # files; older ones are removed unread

log = logging.getLogger("invoker.log_file")


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """A line as the file has it; `number` grows with each."""

    number: int
    function: str
    version: int
    text: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Frame).decode


class LogFile:
    """The file of one node. Belongs to the event loop's thread; after an error nothing more is written."""

    def __init__(self, folder: Path, node: str, epoch: int) -> None:
        """Create and lock the file. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{node}.{epoch}{SUFFIX}"
        new = self.path.with_suffix(".new")  # until it is locked: then no other node takes it
        self._fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(self.path)
        self._position = self._number = 0

    def __repr__(self) -> str:
        return f"<LogFile {self.path} at {self._position}>"

    def write(self, lines: Iterable[LoggedLine]) -> None:
        """Append lines, over the oldest ones."""
        for line in lines:
            frame = _Frame(self._number, line.function, line.version, line.text)
            data = b"\n" + _encode(frame) + b"\n"
            if self._position + len(data) > MAX_FILE_BYTES:
                self._position = 0
            try:
                if self._fd >= 0:
                    os.pwrite(self._fd, data, self._position)
            except OSError as error:
                log.warning("%s: log lines are kept in memory only: %s", self.path, error)
                self.close()
            self._position += len(data)
            self._number += 1

    def close(self) -> None:
        """Remove the file: its node ends as it should."""
        if self._fd >= 0:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLog:
    """The lines of a node that was killed, oldest first."""

    node: str
    lines: tuple[LoggedLine, ...]


def recover_logs(folder: Path) -> list[RecoveredLog]:
    """Return the lines that killed nodes left in the folder, the longest dead first; remove their files."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            found.append((path.stat().st_mtime, path))
    recovered = []
    for place, (_, path) in enumerate(sorted(found, reverse=True)):
        with suppress(OSError):  # locked, as its node runs, or removed by another node
            data = _take(path, read=place < MAX_RECOVERED)
            node = path.name.removesuffix(SUFFIX).rpartition(".")[0]
            if data:
                recovered.append(RecoveredLog(node=node, lines=_lines(data)))
    return recovered[::-1]


def _take(path: Path, *, read: bool) -> bytes:
    """Remove a file that no node has locked; return what it had. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        data = os.pread(fd, MAX_FILE_BYTES, 0) if read else b""
        path.unlink()
        return data
    finally:
        os.close(fd)


def _lines(data: bytes) -> tuple[LoggedLine, ...]:
    """Return the last lines without a gap, in their order.

    What is left of a line that was written over is no frame; an earlier round can leave frames at the end.
    """
    frames: list[_Frame] = []
    for text in data.split(b"\n"):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            frames.append(_decode(text))
    frames.sort(key=lambda frame: frame.number)
    gaps = [at for at in range(1, len(frames)) if frames[at].number != frames[at - 1].number + 1]
    frames = frames[max(gaps, default=0) :]
    return tuple(LoggedLine(one.function, one.version, one.text) for one in frames)
