"""The folder of a host tier: its files, who uses it, and the lock under which it changes.

Files
    users           LOCK_SH by every process that uses the tier; who gets LOCK_EX at its end is the last
    lock            LOCK_EX for a moment around each change of the folder, so that sizes add up
    <sha>.part      an image being loaded, LOCK_EX by its loader
    <sha>           a complete image, LOCK_SH by whoever has it mapped; its mtime is its last use
    <sha>.keep      the image is the copy that the cluster keeps: it is evicted after all others
    <random>.spare  memory ready for the next image, LOCK_EX by its maker (spare.py); gives way to images

Locks are flock's: a process that dies by kill -9 lets go of them, so that its unfinished load is taken
over and whatever it had mapped can be evicted.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from invoker.errors import HostTierError

PART = ".part"
KEEP = ".keep"
SPARE = ".spare"
USERS = "users"
_DIGEST_LENGTH = 64

log = logging.getLogger("invoker.tier_folder")


class TierFolder:
    """One process's use of the folder, from the constructor to `leave`. Any thread may call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._users_fd = self._join()
        self._sweep()

    def __repr__(self) -> str:
        return f"<TierFolder {self.path} {'left' if self._users_fd < 0 else 'in use'}>"

    def image(self, digest: str) -> Path:
        return self.path / digest

    def part(self, digest: str) -> Path:
        return self.path / (digest + PART)

    def spare(self, name: str) -> Path:
        return self.path / (name + SPARE)

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """The image files, complete or not; those that vanish meanwhile are left out."""
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
        """Bytes of all spares, of this process or others."""
        return sum(stat.st_size for _, stat in _stats(list(self.path.glob(f"*{SPARE}"))))

    def free_bytes(self) -> int:
        """What the file system has left."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def discard_spares(self) -> None:
        """Take the memory of all spares, whosever they are. The folder is locked."""
        for path in self.path.glob(f"*{SPARE}"):
            with suppress(FileNotFoundError), path.open("r+b") as file:
                cut_and_remove(path, file.fileno())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; for a few system calls at most."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostTierError(f"the host tier {self.path} is gone: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def leave(self) -> None:
        """Stop using the folder; the last process of the host takes the images with it. Idempotent.

        Tiers beside this one that no process uses any more (theirs were killed) go as well.
        """
        if self._users_fd < 0:
            return
        fd, self._users_fd = self._users_fd, -1
        try:
            remove_if_unused(self.path, fd)
            self._remove_unused_beside()
            self.path.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                log.warning("cannot remove the host tier %s: %s", self.path, error)

    def _join(self) -> int:
        """Make the folder if it is missing and take the users lock on it."""
        path = self.path / USERS
        while True:
            try:
                for folder in (self.path.parent, self.path):
                    _private_folder(folder)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # the last user of before removed it between two of these calls
            except OSError as error:
                raise HostTierError(f"cannot use {self.path} as host tier: {error.strerror}") from error
            fcntl.flock(fd, fcntl.LOCK_SH)
            # The last user of before may have removed the folder while this process waited.
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)

    def _sweep(self) -> None:
        """Remove what killed processes left: tiers beside this one, and spares here.

        Complete images of this tier were checked when they came; of unfinished ones those who go on with
        them check all. They stay and count.
        """
        self._remove_unused_beside()
        with self.locked():
            for path in self.path.glob(f"*{SPARE}"):
                remove_if_idle(path)

    def _remove_unused_beside(self) -> None:
        for users in sorted(self.path.parent.glob(f"*/{USERS}")):
            if users.parent != self.path:
                try:
                    remove_if_unused(users.parent, os.open(users, os.O_RDWR | os.O_CLOEXEC))
                except OSError as error:
                    # Gone meanwhile, or in use again: a node that joined before the folder was removed.
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                        raise


def marker(path: Path) -> Path:
    """The file that marks an image as kept."""
    return path.with_name(path.name + KEEP)


def unlink(path: Path) -> None:
    """Remove an image, if it is still there, and its mark."""
    path.unlink(missing_ok=True)
    marker(path).unlink(missing_ok=True)


def cut_and_remove(path: Path, fd: int) -> None:
    """Remove a spare, and its memory at once, though it is mapped."""
    os.ftruncate(fd, 0)
    path.unlink(missing_ok=True)


@contextmanager
def idle(path: Path) -> Iterator[int | None]:
    """A descriptor of the file, locked until the block ends; None if it is gone or locked by a process."""
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
    """Remove a file that no process holds a lock on. The folder is locked."""
    with idle(path) as fd:
        if fd is not None:
            unlink(path)
        return fd is not None


def is_open_elsewhere(fd: int) -> bool:
    """Whether any process, this one included, has the file open or mapped besides `fd`, opened for writing.

    A lease for writing is granted to the only one that has a file open.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # it is, or this file system gives no leases
        return True
    return False


def remove_if_unused(directory: Path, users_fd: int) -> None:
    """Remove a tier that nobody else uses. Closes `users_fd`, a descriptor of its users file."""
    try:
        fcntl.flock(users_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Somebody else removed that tier since the file was opened: what is there now is another's.
        if not os.fstat(users_fd).st_nlink:
            return
        # The users file goes last: a process that joins meanwhile waits for its lock until then.
        for path in sorted(directory.iterdir(), key=lambda path: path.name == USERS):
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
    """Make a folder for this user alone; refuse one that somebody else put there (/dev/shm is shared)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.lstat()
    if folder.is_symlink() or stat.st_uid != os.geteuid():
        raise HostTierError(f"{folder} belongs to somebody else: remove it or choose another --shm-dir")
