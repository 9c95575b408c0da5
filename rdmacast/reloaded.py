"""Values that are read from files again when the files change."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Stamp = tuple[tuple[int, int, int], ...]


class Reloaded(Generic[T]):
    """A value read from files: call it for the present one. May be called from several threads.

    Changes are found by inode, size and time, through symbolic links. Files that cannot be read, or are half
    replaced, leave the value as it was; the log has one warning for each such change. `read` raises OSError
    or ValueError.
    """

    def __init__(self, read: Callable[[], T], paths: Sequence[Path]) -> None:
        self._read = read
        self._paths = tuple(paths)
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._value = read()

    def __repr__(self) -> str:
        return f"<Reloaded {', '.join(map(str, self._paths))}>"

    def __call__(self) -> T:
        if self._look() != self._stamp:
            self._reload()
        return self._value

    def _reload(self) -> None:
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp  # before the read: what changes meanwhile is read the next time
            names = ", ".join(map(str, self._paths))
            try:
                self._value = self._read()
            except (OSError, ValueError) as error:
                logger.warning("%s: changed, but unusable, so the earlier content stays: %s", names, error)
            else:
                logger.info("%s: read again after a change", names)

    def _look(self) -> _Stamp | None:
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return None
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)
