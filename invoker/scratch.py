"""Scratch folders of nodes, for the files of their handlers; those of killed nodes are swept by the next."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from invoker.errors import SettingsError


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder below `parent` until the block ends. Raises SettingsError if it cannot be had.

    A flock on the folder marks it as in use, which ends with the process however it ends.
    """
    folder, fd = _make(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)
        with suppress(OSError):  # other nodes use it
            parent.rmdir()


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stat = parent.lstat()
            if parent.is_symlink() or stat.st_uid != os.geteuid():
                raise SettingsError(f"{parent} belongs to somebody else: remove it or choose another TMPDIR")
            _sweep(parent)
            folder = Path(tempfile.mkdtemp(prefix="node-", dir=parent))
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another node left, or swept, between two of these calls
        except OSError as error:
            raise SettingsError(f"no scratch folder in {parent}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder, fd
        os.close(fd)  # swept before it was locked


def _sweep(parent: Path) -> None:
    """Remove what killed nodes left."""
    for folder in parent.iterdir():
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone by now, or no node's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
