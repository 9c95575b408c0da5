"""The host tier: model images in shared memory, one copy for all invokers of a host.

No method but `wait` waits for other processes longer than for the folder's lock. Thread-safe.
"""

import fcntl
import logging
import mmap
import os
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from invoker.base.errors import HostTierFull
from invoker.host_tier.buffer_pool import MIN_BYTES, PartialFile, SpareBuffer
from invoker.host_tier.folder import (
    PART,
    TierFolder,
    idle,
    inodes,
    is_file,
    is_open_elsewhere,
    mark,
    marker,
    rejected,
    remove_if_idle,
    unlink,
    verified,
)
from invoker.host_tier.image_writer import ImageWriter, LoadElsewhere
from invoker.host_tier.mapping import HostMapping, map_file
from invoker.memory.mappings import advise_huge, available_bytes

LATEST = 4  # recent loads; the largest gives the size of the spare buffer
SPARE_SHARE = 4  # a spare buffer takes at most 1/SPARE_SHARE of the free memory

log = logging.getLogger("invoker.host_tier")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostImage:
    """A complete image of the tier; a `verified` one has its SHA-256."""

    digest: str
    nbytes: int
    last_used_at: float
    kept: bool = False
    verified: bool = False


class HostTier:
    """The shared images of one host, within `limit_bytes`; closed when the process leaves.

    In the room left by images, the process keeps a pre-faulted buffer of up to `spare_bytes` for the next
    one.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, spare_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.evictions = 0
        self._spare_bytes = spare_bytes
        self._spare: SpareBuffer | None = None
        self._loads = 0
        self._latest_bytes: deque[int] = deque(maxlen=LATEST)  # of images loaded
        self._folder = TierFolder(directory)
        self._ensure_spare()

    def __repr__(self) -> str:
        return f"<HostTier {self.directory} {self.used_bytes()} of {self.limit_bytes} bytes>"

    @property
    def directory(self) -> Path:
        return self._folder.path

    def used_bytes(self) -> int:
        """Return the bytes of complete and partial images, without spare buffers."""
        return sum(stat.st_size for _, stat in self._folder.files())

    def images(self) -> list[HostImage]:
        """Return the complete images, least recently used first."""
        found = [
            HostImage(
                digest=path.name,
                nbytes=stat.st_size,
                last_used_at=stat.st_mtime,
                kept=marker(path).exists(),
                verified=stat.st_ino in inodes(verified(path)),
            )
            for path, stat in self._folder.files()
            if path.suffix != PART
        ]
        return sorted(found, key=lambda image: image.last_used_at)

    def holds(self, digest: str) -> bool:
        return self._folder.image(digest).exists()

    def has_file(self, digest: str) -> bool:
        """Return whether the tier has the image, or a part of it: being loaded, or left by a dead process."""
        return self.holds(digest) or self._folder.part(digest).exists()

    def open(self, digest: str) -> HostMapping | None:
        """Map a complete image and record the use; None if it is not in the tier."""
        path = self._folder.image(digest)
        with self._folder.locked():
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.utime(path)
        nbytes = os.fstat(fd).st_size
        return HostMapping(path, fd, map_file(fd, nbytes), nbytes)

    def touch(self, digest: str) -> None:
        """Record that an image was in use until now, if it is in the tier."""
        with suppress(FileNotFoundError):
            os.utime(self._folder.image(digest))

    def keep(self, digest: str) -> bool:
        """Mark a complete image as the cluster's retained copy; return False if it is not in the tier."""
        path = self._folder.image(digest)
        with self._folder.locked():
            if not path.exists():
                return False
            marker(path).touch(mode=0o600)
            return True

    def unkeep(self, digest: str) -> None:
        """Remove the retention mark; the image stays."""
        with self._folder.locked():
            marker(self._folder.image(digest)).unlink(missing_ok=True)

    def is_verified(self, digest: str, inode: int) -> bool:
        """Return whether this file, as a whole, was found to have its SHA-256."""
        return inode in inodes(verified(self._folder.image(digest)))

    def is_rejected(self, digest: str, inode: int) -> bool:
        """Return whether a process of the host has discarded this file."""
        with self._folder.locked():
            return inode in inodes(rejected(self._folder.image(digest)))

    def mark_verified(self, digest: str, inode: int) -> None:
        """Mark an image as verified, if it is still this file."""
        path = self._folder.image(digest)
        with self._folder.locked():
            if is_file(path, inode):
                mark(verified(path), {inode})

    def open_file(self, digest: str, inode: int) -> int | None:
        """Open a complete image for reading, without a lock: it may be evicted.

        None if this file is not here any more.
        """
        try:
            fd = os.open(self._folder.image(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(fd).st_ino == inode:
            return fd
        os.close(fd)
        return None

    def discard(self, digest: str, inode: int) -> None:
        """Remove this file of an image, also where it is mapped, and leave a marker with the reason."""
        path = self._folder.image(digest)
        with self._folder.locked():
            mark(rejected(path), inodes(rejected(path)) | {inode})
            if is_file(path, inode):
                unlink(path)

    def begin(
        self, digest: str, nbytes: int, *, yielding: bool = False
    ) -> ImageWriter | LoadElsewhere | None:
        """Become the loader of an image, evicting others if necessary.

        Retained images are evicted last, or never if `yielding`. Return None if the image is complete. A dead
        process's partial image is resumed, with its contents to be verified (ImageWriter.is_resumed). Raises
        HostTierFull.
        """
        part = self._folder.part(digest)
        with self._folder.locked():
            if self.holds(digest):
                return None
            opened = self._resume(part, nbytes)
            if isinstance(opened, LoadElsewhere):
                return opened
            if opened is None:
                opened = self._open_part(part, nbytes, yielding=yielding)
            self._loads += 1
            self._latest_bytes.append(nbytes)
        writer = ImageWriter(self._folder, digest, opened, nbytes, self._on_load_end)
        try:
            writer.fit()
        except BaseException:
            writer.abandon()
            raise
        return writer

    @staticmethod
    def wait(elsewhere: LoadElsewhere) -> None:
        """Block until the other process has finished its load or died."""
        try:
            fcntl.flock(elsewhere.fd, fcntl.LOCK_SH)
        finally:
            elsewhere.close()

    def evict(self, digest: str) -> bool:
        """Evict a complete image; return False if it is mapped by a process or not in the tier."""
        with self._folder.locked():
            evicted = remove_if_idle(self._folder.image(digest))
        if evicted:
            self._ensure_spare()
        return evicted

    def wait_for_spare(self) -> int:
        """Block until the spare buffer is populated; return its populated bytes."""
        spare = self._spare
        if spare is None:
            return 0
        spare.wait()
        return spare.ready_bytes if spare.exists else 0

    def close(self) -> None:
        """Leave the tier; the last process of the host removes all images. Idempotent."""
        self._spare_bytes = 0
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.discard()
            spare.wait()
        self._folder.leave()

    def _on_load_end(self) -> None:
        with self._folder.locked():
            self._loads -= 1
        self._ensure_spare()

    def _ensure_spare(self) -> None:
        """Create a spare buffer if there is none and there is room.

        Not during loads, which it would slow down.
        """
        if self._spare_bytes < MIN_BYTES:
            return
        with self._folder.locked():
            if self._loads or (self._spare is not None and self._spare.exists):
                return
            wanted = min(self._spare_bytes, max(self._latest_bytes, default=self._spare_bytes))
            room = self.limit_bytes - self.used_bytes() - self._folder.spare_bytes()
            limit = min(available_bytes(), self._folder.free_bytes()) // SPARE_SHARE
            nbytes = min(wanted + -wanted % mmap.PAGESIZE, room, limit)
            nbytes -= nbytes % mmap.PAGESIZE
            if nbytes < MIN_BYTES:
                return
            try:
                self._spare = SpareBuffer(self._folder, nbytes)
            except (OSError, RuntimeError) as error:
                log.warning("cannot pre-fault memory for the next image: %s", error)

    def _take_spare(self, part: Path, nbytes: int) -> PartialFile | None:
        """Return the spare buffer as the file of an image, if it fits. The folder is locked."""
        spare = self._spare
        if spare is None or not spare.fits(nbytes):
            return None
        self._spare = None
        return spare.take(part, nbytes)

    def _make_room(self, part: Path, nbytes: int, *, yielding: bool) -> int | None:
        """Evict until `nbytes` fit: partial images of dead processes first, then the least recently used.

        Retained images are evicted last, not at all if `yielding`; none is evicted if all would not be
        enough. The largest evicted file is renamed to `part`, and its locked descriptor returned. Raises
        HostTierFull.
        """
        if nbytes > self.limit_bytes:
            raise HostTierFull(
                f"an image of {nbytes} bytes cannot fit the host tier of {self.limit_bytes} bytes: "
                f"raise --host-memory"
            )
        files = self._folder.files()
        kept = {path for path, _ in files if marker(path).exists()}
        files.sort(key=lambda file: (file[0].suffix != PART, file[0] in kept, file[1].st_mtime))
        used = sum(stat.st_size for _, stat in files)
        with ExitStack() as locks:
            evicted: list[tuple[int, Path, int]] = []
            for path, stat in files:
                if used + nbytes <= self.limit_bytes:
                    break
                if not stat.st_size or (yielding and path in kept):
                    continue
                if (fd := locks.enter_context(idle(path))) is not None:
                    used -= stat.st_size
                    evicted.append((stat.st_size, path, fd))
            if used + nbytes > self.limit_bytes:
                raise HostTierFull(
                    f"an image of {nbytes} bytes does not fit the host tier: of its {self.limit_bytes} bytes "
                    f"{used} are in use or retained: stop instances or raise --host-memory"
                )
            largest = max(evicted)[1] if evicted else None
            for _, path, _ in evicted:
                if path == largest:
                    path.rename(part)
                unlink(path)
                if path.suffix != PART:
                    self.evictions += 1
                    retained = " (the cluster's retained copy)" if path in kept else ""
                    log.info("evicted image %s%s from the host tier", path.name[:12], retained)
            return os.dup(max(evicted)[2]) if evicted else None

    def _open_part(self, part: Path, nbytes: int, *, yielding: bool) -> PartialFile:
        """Make room for an image and return a new file for it. The folder is locked."""
        evicted = self._make_room(part, nbytes, yielding=yielding)
        opened = self._take_spare(part, nbytes)
        if opened is None:
            opened = _new_part(part, nbytes, evicted)
        elif evicted is not None:
            os.close(evicted)
        if self.used_bytes() + self._folder.spare_bytes() > self.limit_bytes:
            self._folder.discard_spares()
        return opened

    def _resume(self, part: Path, nbytes: int) -> PartialFile | LoadElsewhere | None:
        """Return a dead process's partial image, or the load of a living process. The folder is locked.

        A file that does not fit is removed, not truncated: a peer that maps it would die by SIGBUS.
        """
        try:
            fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return LoadElsewhere(fd)
        if os.fstat(fd).st_size == nbytes and self.used_bytes() <= self.limit_bytes:
            mapping = map_file(fd, nbytes)
            advise_huge(mapping)
            return PartialFile(fd, mapping, 0, is_resumed=True)
        part.unlink()
        os.close(fd)
        return None


def _new_part(part: Path, nbytes: int, evicted: int | None) -> PartialFile:
    """Return a file for an image, reusing an evicted one if it is not open elsewhere. Owns `evicted`."""
    fd = evicted
    if fd is not None and is_open_elsewhere(fd):
        part.unlink()
        os.close(fd)
        fd = None
    if fd is None:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, nbytes)
        mapping = map_file(fd, nbytes)
    except BaseException:
        part.unlink()
        os.close(fd)
        raise
    advise_huge(mapping)
    return PartialFile(fd, mapping, 0)
