"""Scratch folders for handlers; a starting node removes those of killed nodes."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from invoker.base.errors import SettingsError


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Create a folder in `parent` that exists while the block lasts. Raises SettingsError on failure.

    A flock marks the folder as in use; the kernel releases it when the process ends.
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
                raise SettingsError(f"{parent} belongs to another user: remove it or choose another TMPDIR")
            _remove_orphaned(parent)
            folder = Path(tempfile.mkdtemp(prefix="node-", dir=parent))
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another node removed it between two of these calls
        except OSError as error:
            raise SettingsError(f"cannot create a scratch folder in {parent}: {error.strerror}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder, fd
        os.close(fd)  # removed before it was locked


def _remove_orphaned(parent: Path) -> None:
    """Remove the folders of killed nodes."""
    for folder in parent.iterdir():
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # removed meanwhile, or not a node's folder
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
