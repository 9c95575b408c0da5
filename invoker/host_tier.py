"""The host tier: model images in shared memory, one copy for all invokers of a host.

Files of the tier's directory
    users           LOCK_SH by every process that uses the tier; who gets LOCK_EX at its end is the last
    lock            LOCK_EX for a moment around each change of the directory, so that sizes add up
    <sha>.part      an image being loaded, LOCK_EX by its loader
    <sha>           a complete image, LOCK_SH by whoever has it mapped; its mtime is its last use
    <sha>.keep      the image is the copy that the cluster keeps: it is evicted after all others

Locks are flock's: a process that dies by kill -9 lets go of them, so that its unfinished load is taken
over and whatever it had mapped can be evicted. No method waits for a peer process longer than the
directory lock is held; `wait` is the exception, and says so. All methods may be called from any thread.
"""

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from invoker.errors import HostTierError, HostTierFull
from invoker.memory import advise_huge, populate

PART = ".part"
KEEP = ".keep"
USERS = "users"
_DIGEST_LENGTH = 64

log = logging.getLogger("invoker.host_tier")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostImage:
    """A complete image of the tier."""

    digest: str
    nbytes: int
    last_used_at: float
    kept: bool = False


class HostMapping:
    """A complete image, mapped and kept from eviction until `close`."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)[:nbytes].toreadonly()

    def __repr__(self) -> str:
        return f"<HostMapping {self.path.name[:12]} {'closed' if self._fd < 0 else 'open'}>"

    @property
    def view(self) -> memoryview:
        return self._view

    def close(self) -> None:
        """Let the image go. Idempotent; views that others still hold stay readable until they drop them."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        # mmap holds a duplicate of the descriptor: only an explicit unlock ends the lock now.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        mapping, self._mapping = self._mapping, None
        release(self._view)
        _close_mapping(mapping)


class Filling:
    """An image being loaded by this process: `prepare` a range, write it into `view`; at the end
    `publish` or `abandon`."""

    def __init__(self, tier: "HostTier", digest: str, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        self.digest = digest
        self.nbytes = nbytes
        self._tier = tier
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self._view = memoryview(mapping)[:nbytes]

    def __repr__(self) -> str:
        return f"<Filling {self.digest[:12]} {'closed' if self._fd < 0 else 'open'}>"

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def path(self) -> Path:
        """The file as long as it is being filled."""
        return self._tier.directory / (self.digest + PART)

    def prepare(self, offset: int, nbytes: int) -> None:
        """Take the memory of `[offset, offset + nbytes)`; blocks. Raises HostTierFull.

        A write to a page that cannot be had would kill the process by SIGBUS. Taken by ranges, the
        first bytes need not wait until all of a large image has been.
        """
        assert self._mapping is not None
        try:
            if not populate(self._mapping, offset, nbytes):
                os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._full() from error

    def receive(self, offset: int, nbytes: int, source: int) -> bool:
        """Copy a range of an open file to the same place; blocks. Raises HostTierFull.

        Unlike `prepare` it takes the memory without clearing it first. False if the file cannot be
        copied so; why, a read of it will tell.
        """
        end = offset + nbytes
        try:
            with self.path.open("r+b", buffering=0) as target:
                target.seek(offset)
                while offset < end:
                    sent = os.sendfile(target.fileno(), source, offset, end - offset)
                    if not sent:
                        return False
                    offset += sent
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full() from error
            return False
        return True

    def _full(self) -> HostTierFull:
        return HostTierFull(
            f"{self._tier.directory} ran full: image {self.digest[:12]} of {self.nbytes} bytes does not "
            f"fit in shared memory (make it larger or lower --host-memory)"
        )

    def publish(self) -> HostMapping:
        """Make the image visible to the host, atomically; it stays mapped for the caller, and `view` goes."""
        assert self._mapping is not None
        final = self._tier.directory / self.digest
        with self._tier.locked():
            self.path.rename(final)
            os.utime(final)
            # Lets waiting processes go on. Converting a lock is not atomic, but eviction, which could
            # slip in between, happens under the directory lock only.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        fd, self._fd = self._fd, -1
        mapping, self._mapping = self._mapping, None
        release(self._view)
        return HostMapping(final, fd, mapping, self.nbytes)

    def abandon(self) -> None:
        """Drop what was loaded. Idempotent, and without effect after `publish`."""
        if self._fd < 0:
            return
        with self._tier.locked():
            self.path.unlink(missing_ok=True)
            fd, self._fd = self._fd, -1
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        mapping, self._mapping = self._mapping, None
        release(self._view)
        _close_mapping(mapping)


@dataclass(frozen=True, slots=True)
class LoadElsewhere:
    """Another process of the host is loading the image; give it to `HostTier.wait`, or `close` it."""

    fd: int

    def close(self) -> None:
        os.close(self.fd)


class HostTier:
    """The shared images of one host, within `limit_bytes`. `close` when the process leaves."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self.evictions = 0
        self._users_fd = self._join()
        self._sweep()

    def __repr__(self) -> str:
        return f"<HostTier {self.directory} {self.used_bytes()} of {self.limit_bytes} bytes>"

    def used_bytes(self) -> int:
        """Bytes of complete images and of those being loaded."""
        return sum(stat.st_size for _, stat in self._files())

    def images(self) -> list[HostImage]:
        """The complete images, least recently used first."""
        found = [
            HostImage(
                digest=path.name,
                nbytes=stat.st_size,
                last_used_at=stat.st_mtime,
                kept=_marker(path).exists(),
            )
            for path, stat in self._files()
            if path.suffix != PART
        ]
        return sorted(found, key=lambda image: image.last_used_at)

    def holds(self, digest: str) -> bool:
        return (self.directory / digest).exists()

    def is_loading(self, digest: str) -> bool:
        """Whether a load of the image was begun and not finished (its process may have died since)."""
        return (self.directory / (digest + PART)).exists()

    def open(self, digest: str) -> HostMapping | None:
        """Map a complete image, counting as a use; None if it is not here."""
        path = self.directory / digest
        with self.locked():
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.utime(path)
        nbytes = os.fstat(fd).st_size
        return HostMapping(path, fd, _map(fd, nbytes), nbytes)

    def keep(self, digest: str) -> bool:
        """Mark a complete image as the copy that the cluster keeps; False if it is not here."""
        path = self.directory / digest
        with self.locked():
            if not path.exists():
                return False
            _marker(path).touch(mode=0o600)
            return True

    def unkeep(self, digest: str) -> None:
        """Take the mark away; the image stays."""
        with self.locked():
            _marker(self.directory / digest).unlink(missing_ok=True)

    def begin(self, digest: str, nbytes: int, *, yielding: bool = False) -> Filling | LoadElsewhere | None:
        """Become the loader of an image, making room first: not of kept images if `yielding`, and else
        of them last. Raises HostTierFull.

        None if the image is complete by now. An unfinished load of a process that died starts again
        from nothing: what it wrote is not trusted.
        """
        part = self.directory / (digest + PART)
        with self.locked():
            if self.holds(digest):
                return None
            if (busy := self._take_over(part)) is not None:
                return LoadElsewhere(busy)
            self._make_room(nbytes, yielding=yielding)
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.ftruncate(fd, nbytes)
            except BaseException:
                part.unlink()
                os.close(fd)
                raise
        mapping = _map(fd, nbytes)
        advise_huge(mapping)
        return Filling(self, digest, fd, mapping, nbytes)

    @staticmethod
    def wait(elsewhere: LoadElsewhere) -> None:
        """Block the calling thread until the other process finished its load, or died."""
        try:
            fcntl.flock(elsewhere.fd, fcntl.LOCK_SH)
        finally:
            elsewhere.close()

    def evict(self, digest: str) -> bool:
        """Drop a complete image that nobody has mapped; False if it is in use or not here."""
        with self.locked():
            return self._remove(self.directory / digest)

    def close(self) -> None:
        """Leave the tier; the last process of the host takes the images with it. Idempotent.

        Tiers beside this one that no process uses any more (theirs were killed) go as well.
        """
        if self._users_fd < 0:
            return
        fd, self._users_fd = self._users_fd, -1
        try:
            _remove_if_unused(self.directory, fd)
            self._remove_unused_beside()
            self.directory.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                log.warning("cannot remove the host tier %s: %s", self.directory, error)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory lock; for a few system calls at most."""
        try:
            fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostTierError(f"the host tier {self.directory} is gone: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _join(self) -> int:
        """Make the directory if it is missing and take the users lock on it."""
        path = self.directory / USERS
        while True:
            try:
                for folder in (self.directory.parent, self.directory):
                    _private_folder(folder)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # the last user of before removed it between two of these calls
            except OSError as error:
                raise HostTierError(f"cannot use {self.directory} as host tier: {error.strerror}") from error
            fcntl.flock(fd, fcntl.LOCK_SH)
            # The last user of before may have removed the folder while this process waited.
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)

    def _sweep(self) -> None:
        """Remove what processes that were killed left: tiers beside this one, and unfinished loads here.

        Complete images of this tier were checked when they came, so they stay and count.
        """
        self._remove_unused_beside()
        with self.locked():
            for path in self.directory.glob(f"*{PART}"):
                self._remove(path)

    def _remove_unused_beside(self) -> None:
        for users in sorted(self.directory.parent.glob(f"*/{USERS}")):
            if users.parent != self.directory:
                try:
                    _remove_if_unused(users.parent, os.open(users, os.O_RDWR | os.O_CLOEXEC))
                except OSError as error:
                    # Gone meanwhile, or in use again: a node that joined before the folder was removed.
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                        raise

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The image files, complete or not; those that vanish meanwhile are left out."""
        found = []
        try:
            paths = [
                path
                for path in self.directory.iterdir()
                if len(path.stem) == _DIGEST_LENGTH and path.suffix != KEEP
            ]
        except FileNotFoundError:
            return []
        for path in paths:
            try:
                found.append((path, path.stat()))
            except FileNotFoundError:
                continue
        return found

    def _make_room(self, nbytes: int, *, yielding: bool) -> None:
        """Evict until `nbytes` more fit: loads of dead processes first, then images by least recent use,
        kept ones last (not at all if `yielding`). Nothing goes where all of it would not be enough."""
        if nbytes > self.limit_bytes:
            raise HostTierFull(
                f"an image of {nbytes} bytes cannot fit the host tier of {self.limit_bytes} bytes: "
                f"raise --host-memory"
            )
        files = self._files()
        kept = {path for path, _ in files if _marker(path).exists()}
        files.sort(key=lambda file: (file[0].suffix != PART, file[0] in kept, file[1].st_mtime))
        used = sum(stat.st_size for _, stat in files)
        with ExitStack() as locks:
            going: list[Path] = []
            for path, stat in files:
                if used + nbytes <= self.limit_bytes:
                    break
                if stat.st_size and not (yielding and path in kept) and locks.enter_context(_idle(path)):
                    used -= stat.st_size
                    going.append(path)
            if used + nbytes > self.limit_bytes:
                raise HostTierFull(
                    f"the host tier has {self.limit_bytes} bytes, {used} of them in use or kept, so an image "
                    f"of {nbytes} bytes does not fit: stop instances or raise --host-memory"
                )
            for path in going:
                _unlink(path)
                if path.suffix != PART:
                    self.evictions += 1
                    last = ", which the cluster was to keep," if path in kept else ""
                    log.info("evicted image %s%s from the host tier", path.name[:12], last)

    def _take_over(self, part: Path) -> int | None:
        """Remove an unfinished load if its process died; else a descriptor of it. The directory is locked.

        Removed, not cut short: a peer that still maps the file would die of SIGBUS.
        """
        try:
            fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return fd
        part.unlink()
        os.close(fd)
        return None

    def _remove(self, path: Path) -> bool:
        """Unlink a file that no process holds a lock on. The directory is locked."""
        with _idle(path) as idle:
            if idle:
                _unlink(path)
            return idle


@contextmanager
def _idle(path: Path) -> Iterator[bool]:
    """Whether the file is there and no process holds a lock on it; if so, locked until the block ends."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


def _unlink(path: Path) -> None:
    """Remove an image and its mark."""
    path.unlink()
    _marker(path).unlink(missing_ok=True)


def _remove_if_unused(directory: Path, users_fd: int) -> None:
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


def _marker(path: Path) -> Path:
    """The file that marks an image as kept."""
    return path.with_name(path.name + KEEP)


def _private_folder(folder: Path) -> None:
    """Make a folder for this user alone; refuse one that somebody else put there (/dev/shm is shared)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.lstat()
    if folder.is_symlink() or stat.st_uid != os.geteuid():
        raise HostTierError(f"{folder} belongs to somebody else: remove it or choose another --shm-dir")


def _map(fd: int, nbytes: int) -> mmap.mmap:
    # An empty file cannot be mapped; one page of it can be, since the view is cut to size anyway.
    return mmap.mmap(fd, nbytes) if nbytes else mmap.mmap(-1, mmap.PAGESIZE)


def release(view: memoryview) -> None:
    """Let a view go now, not when it is collected; one that is being read stays until it is."""
    with suppress(BufferError):
        view.release()


def _close_mapping(mapping: mmap.mmap | None) -> None:
    # While somebody still holds a view (a peer's read under way), the mapping goes with the last view.
    with suppress(BufferError):
        if mapping is not None:
            mapping.close()


def close_if_open(mapping: HostMapping | None) -> None:
    """Close what `HostTier.open` gave, if it gave anything."""
    if mapping is not None:
        mapping.close()
