"""The disk tier: images on a disk of this host; the least recently used are evicted first.

Files
    lock        LOCK_EX around each change of the folder, so that sizes add up
    <sha>       an image that was verified as a whole; its mtime is its last use
    <sha>.part  one that is being written, LOCK_EX by its writer

Processes of one host may share the folder.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from invoker.host_tier.folder import remove_if_idle
from registry.errors import NotFound
from registry.images.local_reader import LocalReader, translated

STEP_BYTES = 8 << 20
_SYNC_BYTES = 64 << 20  # written before the page cache is freed of them
_FREE_SHARE = 0.05  # of the file system, which is left free
_USUAL_BYTES_S = 2e9  # until a read was measured: an NVMe disk
_MIN_MEASURED_BYTES = 64 << 20
_WEIGHT = 0.3  # of the latest read in the average rate
_PART = ".part"
_DIGEST_LENGTH = 64

log = logging.getLogger("invoker.disk_cache")


class DiskSpace(NamedTuple):
    """The bytes of a file system, in all and free."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskImage:
    """A complete image in the disk tier."""

    digest: str
    nbytes: int
    last_used_at: float


def disk_space(directory: Path) -> DiskSpace:
    """Return the space of the file system that a directory is on."""
    usage = shutil.disk_usage(directory)
    return DiskSpace(total=usage.total, free=usage.free)


SpaceOf = Callable[[Path], DiskSpace]  # of the file system that a directory is on


class DiskCache:
    """The images in a folder, at most `limit_bytes` in all.

    It is read before other nodes are if it is faster than a link (`link_bytes_s`), else only when no node
    has the image. `space` returns that of the folder's file system. Thread-safe but for `measured`, which
    belongs to the event loop.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        link_bytes_s: float,
        space: SpaceOf = disk_space,
    ) -> None:
        self._space = space
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._link_bytes_s = link_bytes_s
        self._bytes_s = _USUAL_BYTES_S
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            for part in directory.glob(f"*{_PART}"):
                remove_if_idle(part)  # of a dead process

    def __repr__(self) -> str:
        return f"<DiskCache {self._directory} of at most {self._limit_bytes} bytes>"

    @property
    def goes_first(self) -> bool:
        """Whether the disk is faster than a link to another node."""
        return self._bytes_s >= self._link_bytes_s

    def measured(self, nbytes: int, seconds: float) -> None:
        """Record the duration of a read."""
        if nbytes >= _MIN_MEASURED_BYTES and seconds > 0:
            self._bytes_s += _WEIGHT * (nbytes / seconds - self._bytes_s)

    def images(self) -> list[DiskImage]:
        """Return the complete images, least recently used first; none if the folder cannot be read."""
        found = []
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # removed since it was listed
                        if len(entry.name) == _DIGEST_LENGTH:
                            stat = entry.stat()
                            found.append(
                                DiskImage(digest=entry.name, nbytes=stat.st_size, last_used_at=stat.st_mtime)
                            )
        except OSError as error:
            log.warning("the disk tier cannot be read: %s", error)
            return []
        return sorted(found, key=lambda image: image.last_used_at)

    def holds(self, digest: str) -> bool:
        return (self._directory / digest).exists()

    def open_blob(self, digest: str) -> LocalReader:
        """Open an image for reading, and record the use. Raises NotFound, StoreError."""
        path = self._directory / digest
        with translated(path):
            try:
                os.utime(path)
                return LocalReader(path)
            except FileNotFoundError:
                raise NotFound(f"image {digest[:12]} is not on the disk") from None

    def drop(self, digest: str) -> bool:
        """Remove an image; return whether it was there. Readers that have it open continue.

        Raises StoreError.
        """
        path = self._directory / digest
        with translated(path), self._locked():
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            return True

    def begin(self, digest: str, nbytes: int) -> "DiskWrite | None":
        """Make room for an image, and return its write.

        None if the image is there or being written, or if there is no room for it.
        """
        part = self._directory / (digest + _PART)
        with self._locked():
            if self.holds(digest):
                with suppress(FileNotFoundError):
                    os.utime(self._directory / digest)
                return None
            if not self._make_room(digest, nbytes):
                return None
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            try:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, max(1, nbytes))
                os.ftruncate(fd, nbytes)
            except BaseException:
                part.unlink(missing_ok=True)
                os.close(fd)
                raise
        return DiskWrite(fd, part, self._directory / digest, nbytes, self._locked)

    def _make_room(self, digest: str, nbytes: int) -> bool:
        """Remove the least recently used images until another fits. The folder is locked."""
        images, parts = self.images(), self._part_bytes()
        disk = self._space(self._directory)
        used = sum(image.nbytes for image in images) + parts
        # What other files of the file system leave.
        kept_free = int(disk.total * _FREE_SHARE)
        limit = min(self._limit_bytes, used + disk.free - kept_free)
        if parts + nbytes > limit:
            log.warning(
                "image %s (%d bytes) does not fit into the disk tier: its limit is %d bytes, of which %d are "
                "being written; %s has %d bytes free, and %d stay free for other files",
                *(digest[:12], nbytes, self._limit_bytes, parts, self._directory, disk.free, kept_free),
            )
            return False
        for image in images:
            if used + nbytes <= limit:
                break
            (self._directory / image.digest).unlink(missing_ok=True)
            used -= image.nbytes
            log.info("evicted image %s from the disk", image.digest[:12])
        return True

    def _part_bytes(self) -> int:
        sizes = 0
        for path in self._directory.glob(f"*{_PART}"):
            with suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


class DiskWrite:
    """An image that is being written; ended by `finish` or `abandon`, under the folder's lock."""

    def __init__(
        self,
        fd: int,
        part: Path,
        path: Path,
        nbytes: int,
        locked: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._locked = locked
        self._fd = fd
        self._part = part
        self._path = path
        self._nbytes = nbytes
        self._synced = 0
        self.offset = 0

    def __repr__(self) -> str:
        return f"<DiskWrite {self._path.name[:12]} {self.offset} of {self._nbytes} bytes>"

    @property
    def is_complete(self) -> bool:
        return self.offset >= self._nbytes

    def step(self, read: Callable[[int, memoryview], int], buffer: memoryview) -> None:
        """Copy the next bytes through the buffer; `read` returns how many it put there. Raises OSError."""
        count = read(self.offset, buffer[: self._nbytes - self.offset])
        if not count:
            raise OSError(f"the copy of image {self._path.name[:12]} is shorter than the image")
        self.offset += os.pwrite(self._fd, buffer[:count], self.offset)
        if self.offset - self._synced >= _SYNC_BYTES or self.is_complete:
            self._sync()

    def finish(self) -> None:
        """Publish the image. Raises OSError."""
        with self._locked():
            self._part.rename(self._path)
            self._close()

    def abandon(self) -> None:
        """Remove what was written; without effect after `finish`."""
        if self._fd < 0:
            return
        with self._locked():
            self._part.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _sync(self) -> None:
        """Write to the disk, and free the page cache of it: the image is in memory already."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, self._synced, self.offset - self._synced, os.POSIX_FADV_DONTNEED)
        self._synced = self.offset
