"""The folder of a host tier: its files, its users, and the lock for changes.

Files
    users           LOCK_SH by each process that uses the tier; the last one to leave gets LOCK_EX
    lock            LOCK_EX around each change of the folder, so that sizes add up
    <sha>.part      a partial image, LOCK_EX by its loader
    <sha>           a complete image, LOCK_SH by each process that maps it; its mtime is its last use
    <sha>.keep      marks the image as the cluster's retained copy, which is evicted after all others
    <sha>.verified  the inode of the file that was found to have this SHA-256, as a whole
    <sha>.rejected  the inodes of files that have not: removed, but other processes may map them still
    models/         folders with links to images (model_folders.py)
    <random>.spare  a pre-faulted buffer, LOCK_EX by its creator (buffer_pool.py); removed for any image

Locks are flocks: the kernel releases those of a killed process, so that its partial image can be resumed and
its mapped images evicted.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from invoker.base.errors import HostTierError

PART = ".part"
KEEP = ".keep"
VERIFIED = ".verified"
REJECTED = ".rejected"
SPARE = ".spare"
MODELS = "models"
USERS = "users"
_DIGEST_LENGTH = 64

log = logging.getLogger("invoker.tier_folder")


class TierFolder:
    """One process's membership in a tier's folder, from construction to `leave`. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._users_fd = self._join()
        self._sweep()

    def __repr__(self) -> str:
        return f"<TierFolder {self.path} {'left' if self._users_fd < 0 else 'joined'}>"

    def image(self, digest: str) -> Path:
        return self.path / digest

    def part(self, digest: str) -> Path:
        return self.path / (digest + PART)

    def spare(self, name: str) -> Path:
        return self.path / (name + SPARE)

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Return the files of complete and partial images, without those removed meanwhile."""
        try:
            paths = [
                path
                for path in self.path.iterdir()
                if len(path.stem) == _DIGEST_LENGTH and path.suffix in ("", PART)
            ]
        except FileNotFoundError:
            return []
        return _stats(paths)

    def spare_bytes(self) -> int:
        """Return the bytes of all processes' spare buffers."""
        return sum(stat.st_size for _, stat in _stats(list(self.path.glob(f"*{SPARE}"))))

    def free_bytes(self) -> int:
        """Return the free bytes of the file system."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def discard_spares(self) -> None:
        """Remove all processes' spare buffers and free their memory. The folder is locked."""
        for path in self.path.glob(f"*{SPARE}"):
            with suppress(FileNotFoundError), path.open("r+b") as file:
                truncate_and_remove(path, file.fileno())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, for a few system calls at most."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostTierError(f"the host tier {self.path} was removed: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def leave(self) -> None:
        """Leave the folder; the last process of the host removes it with all images. Idempotent.

        Sibling tiers whose processes were all killed are removed too.
        """
        if self._users_fd < 0:
            return
        fd, self._users_fd = self._users_fd, -1
        try:
            remove_if_unused(self.path, fd)
            self._remove_unused_siblings()
            self.path.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                log.warning("cannot remove the host tier %s: %s", self.path, error)

    def _join(self) -> int:
        """Create the folder if necessary, and take the users lock."""
        path = self.path / USERS
        while True:
            try:
                for folder in (self.path.parent, self.path):
                    _private_folder(folder)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # the last user removed it between two of these calls
            except OSError as error:
                raise HostTierError(f"cannot use {self.path} as host tier: {error.strerror}") from error
            fcntl.flock(fd, fcntl.LOCK_SH)
            # The last user may have removed the folder while this process waited.
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)

    def _sweep(self) -> None:
        """Remove what killed processes left: sibling tiers, and spare buffers here.

        Complete images stay: they were verified when loaded. So do partial images, which are verified when
        resumed.
        """
        self._remove_unused_siblings()
        with self.locked():
            for path in self.path.glob(f"*{SPARE}"):
                remove_if_idle(path)

    def _remove_unused_siblings(self) -> None:
        for users in sorted(self.path.parent.glob(f"*/{USERS}")):
            if users.parent != self.path:
                try:
                    remove_if_unused(users.parent, os.open(users, os.O_RDWR | os.O_CLOEXEC))
                except OSError as error:
                    # Removed meanwhile, or joined by a node before the folder was removed.
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                        raise


def marker(path: Path) -> Path:
    """Return the file that marks an image as retained."""
    return path.with_name(path.name + KEEP)


def verified(path: Path) -> Path:
    """Return the file that marks an image as verified."""
    return path.with_name(path.name + VERIFIED)


def rejected(path: Path) -> Path:
    """Return the file that names what was rejected of an image."""
    return path.with_name(path.name + REJECTED)


def inodes(marker: Path) -> set[int]:
    """Return the inodes that a marker names."""
    try:
        return set(map(int, marker.read_text().split()))
    except FileNotFoundError:
        return set()


def mark(marker: Path, named: set[int]) -> None:
    """Let a marker name these inodes. The folder is locked."""
    marker.touch(mode=0o600)
    marker.write_text(" ".join(map(str, named)))


def is_file(path: Path, inode: int) -> bool:
    """Return whether the path is still this file."""
    try:
        return path.stat().st_ino == inode
    except FileNotFoundError:
        return False


def unlink(path: Path) -> None:
    """Remove an image and the markers of its file, if they exist."""
    for file in (path, marker(path), verified(path)):
        file.unlink(missing_ok=True)


def truncate_and_remove(path: Path, fd: int) -> None:
    """Remove a spare buffer and free its memory at once, although it is mapped."""
    os.ftruncate(fd, 0)
    path.unlink(missing_ok=True)


@contextmanager
def idle(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of the file, locked while the block lasts.

    None if removed or locked by a process.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def remove_if_idle(path: Path) -> bool:
    """Remove a file that no process has locked; return whether it was removed. The folder is locked."""
    with idle(path) as fd:
        if fd is not None:
            unlink(path)
        return fd is not None


def is_open_elsewhere(fd: int) -> bool:
    """Return whether any process has the file open or mapped other than through `fd`, opened for writing.

    The kernel grants a write lease only to the sole opener of a file.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # open elsewhere, or the file system has no leases
        return True
    return False


def remove_if_unused(directory: Path, users_fd: int) -> None:
    """Remove a tier without other users. Closes `users_fd`, a descriptor of its users file."""
    try:
        fcntl.flock(users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The tier was removed since the file was opened, and the path may belong to a new one.
        if not os.fstat(users_fd).st_nlink:
            return
        # The users file is removed last: a process that joins meanwhile waits for its lock.
        for path in sorted(directory.iterdir(), key=lambda path: path.name == USERS):
            if path.name == MODELS:
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        directory.rmdir()
    except BlockingIOError:
        return
    finally:
        os.close(users_fd)


def _stats(paths: list[Path]) -> list[tuple[Path, os.stat_result]]:
    found = []
    for path in paths:
        try:
            found.append((path, path.stat()))
        except FileNotFoundError:
            continue
    return found


def _private_folder(folder: Path) -> None:
    """Create a folder for this user only; refuse one of another user (/dev/shm is shared)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.lstat()
    if folder.is_symlink() or stat.st_uid != os.geteuid():
        raise HostTierError(f"{folder} belongs to another user: remove it or choose another --shm-dir")
