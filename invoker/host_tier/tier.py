"""The host tier: model images in shared memory, one copy for all invokers of a host.

No method waits for a peer process longer than the folder's lock is held; `wait` is the exception, and
says so. All methods may be called from any thread.
"""

import fcntl
import logging
import mmap
import os
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from invoker.errors import HostTierFull
from invoker.filling import Filling, LoadElsewhere
from invoker.host_mapping import HostMapping, map_file
from invoker.memory import advise_huge, available_bytes
from invoker.spare import LEAST_BYTES, OpenPart, Spare
from invoker.tier_folder import (
    PART,
    TierFolder,
    idle,
    is_open_elsewhere,
    marker,
    remove_if_idle,
    unlink,
)

LATEST = 4  # images loaded, of which the largest says how much memory the next one may want
SPARE_SHARE = 4  # a spare takes at most one part in so many of the memory that is free

log = logging.getLogger("invoker.host_tier")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostImage:
    """A complete image of the tier."""

    digest: str
    nbytes: int
    last_used_at: float
    kept: bool = False


class HostTier:
    """The shared images of one host, within `limit_bytes`. `close` when the process leaves.

    Within what images leave free, the process keeps up to `spare_bytes` of memory ready for the next one.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, spare_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.evictions = 0
        self._spare_bytes = spare_bytes
        self._spare: Spare | None = None
        self._loads = 0
        self._latest_bytes: deque[int] = deque(maxlen=LATEST)  # of images loaded
        self._folder = TierFolder(directory)
        self._keep_spare()

    def __repr__(self) -> str:
        return f"<HostTier {self.directory} {self.used_bytes()} of {self.limit_bytes} bytes>"

    @property
    def directory(self) -> Path:
        return self._folder.path

    def used_bytes(self) -> int:
        """Bytes of complete images and of those being loaded; what is kept ready for more gives way."""
        return sum(stat.st_size for _, stat in self._folder.files())

    def images(self) -> list[HostImage]:
        """The complete images, least recently used first."""
        found = [
            HostImage(
                digest=path.name,
                nbytes=stat.st_size,
                last_used_at=stat.st_mtime,
                kept=marker(path).exists(),
            )
            for path, stat in self._folder.files()
            if path.suffix != PART
        ]
        return sorted(found, key=lambda image: image.last_used_at)

    def holds(self, digest: str) -> bool:
        return self._folder.image(digest).exists()

    def open(self, digest: str) -> HostMapping | None:
        """Map a complete image, counting as a use; None if it is not here."""
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

    def keep(self, digest: str) -> bool:
        """Mark a complete image as the copy that the cluster keeps; False if it is not here."""
        path = self._folder.image(digest)
        with self._folder.locked():
            if not path.exists():
                return False
            marker(path).touch(mode=0o600)
            return True

    def unkeep(self, digest: str) -> None:
        """Take the mark away; the image stays."""
        with self._folder.locked():
            marker(self._folder.image(digest)).unlink(missing_ok=True)

    def begin(self, digest: str, nbytes: int, *, yielding: bool = False) -> Filling | LoadElsewhere | None:
        """Become the loader of an image, making room first: not of kept images if `yielding`, and else
        of them last. Raises HostTierFull.

        None if the image is complete by now. An unfinished load of a process that died is gone on with;
        what it wrote is not trusted (Filling.is_resumed).
        """
        part = self._folder.part(digest)
        with self._folder.locked():
            if self.holds(digest):
                return None
            opened = self._take_over(part, nbytes)
            if isinstance(opened, LoadElsewhere):
                return opened
            if opened is None:
                opened = self._open_part(part, nbytes, yielding=yielding)
            self._loads += 1
            self._latest_bytes.append(nbytes)
        filling = Filling(self._folder, digest, opened, nbytes, self._load_ended)
        try:
            filling.fit()
        except BaseException:
            filling.abandon()
            raise
        return filling

    @staticmethod
    def wait(elsewhere: LoadElsewhere) -> None:
        """Block the calling thread until the other process finished its load, or died."""
        try:
            fcntl.flock(elsewhere.fd, fcntl.LOCK_SH)
        finally:
            elsewhere.close()

    def evict(self, digest: str) -> bool:
        """Drop a complete image that nobody has mapped; False if it is in use or not here."""
        with self._folder.locked():
            evicted = remove_if_idle(self._folder.image(digest))
        if evicted:
            self._keep_spare()
        return evicted

    def wait_for_spare(self) -> int:
        """Block until no more memory is being made ready for the next image; how much is."""
        spare = self._spare
        if spare is None:
            return 0
        spare.wait()
        return spare.ready_bytes if spare.is_there else 0

    def close(self) -> None:
        """Leave the tier; the last process of the host takes the images with it. Idempotent."""
        self._spare_bytes = 0
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.discard()
            spare.wait()
        self._folder.leave()

    def _load_ended(self) -> None:
        with self._folder.locked():
            self._loads -= 1
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Have a spare made, if there is none and there is room; not while its making would slow a load."""
        if self._spare_bytes < LEAST_BYTES:
            return
        with self._folder.locked():
            if self._loads or (self._spare is not None and self._spare.is_there):
                return
            wanted = min(self._spare_bytes, max(self._latest_bytes, default=self._spare_bytes))
            room = self.limit_bytes - self.used_bytes() - self._folder.spare_bytes()
            most = min(available_bytes(), self._folder.free_bytes()) // SPARE_SHARE
            nbytes = min(wanted + -wanted % mmap.PAGESIZE, room, most)
            nbytes -= nbytes % mmap.PAGESIZE
            if nbytes < LEAST_BYTES:
                return
            try:
                self._spare = Spare(self._folder, nbytes)
            except (OSError, RuntimeError) as error:
                log.warning("no memory is kept ready for the next image: %s", error)

    def _take_spare(self, part: Path, nbytes: int) -> OpenPart | None:
        """This process's spare as the file of an image for which there is room. The folder is locked."""
        spare = self._spare
        if spare is None or not spare.suits(nbytes):
            return None
        self._spare = None
        return spare.take(part, nbytes)

    def _make_room(self, part: Path, nbytes: int, *, yielding: bool) -> int | None:
        """Evict until `nbytes` more fit: loads of dead processes first, then images by least recent use,
        kept ones last (not at all if `yielding`). Nothing goes where all of it would not be enough.

        The largest file that went is at `part` then, and its descriptor, locked, the caller's.
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
            going: list[tuple[int, Path, int]] = []
            for path, stat in files:
                if used + nbytes <= self.limit_bytes:
                    break
                if not stat.st_size or (yielding and path in kept):
                    continue
                if (fd := locks.enter_context(idle(path))) is not None:
                    used -= stat.st_size
                    going.append((stat.st_size, path, fd))
            if used + nbytes > self.limit_bytes:
                raise HostTierFull(
                    f"the host tier has {self.limit_bytes} bytes, {used} of them in use or kept, so an image "
                    f"of {nbytes} bytes does not fit: stop instances or raise --host-memory"
                )
            largest = max(going)[1] if going else None
            for _, path, _ in going:
                if path == largest:
                    path.rename(part)
                unlink(path)
                if path.suffix != PART:
                    self.evictions += 1
                    last = ", which the cluster was to keep," if path in kept else ""
                    log.info("evicted image %s%s from the host tier", path.name[:12], last)
            return os.dup(max(going)[2]) if going else None

    def _open_part(self, part: Path, nbytes: int, *, yielding: bool) -> OpenPart:
        """A file for an image that nobody began to load, with room made for it. The folder is locked."""
        evicted = self._make_room(part, nbytes, yielding=yielding)
        opened = self._take_spare(part, nbytes)
        if opened is None:
            opened = _new_part(part, nbytes, evicted)
        elif evicted is not None:
            os.close(evicted)
        if self.used_bytes() + self._folder.spare_bytes() > self.limit_bytes:
            self._folder.discard_spares()
        return opened

    def _take_over(self, part: Path, nbytes: int) -> OpenPart | LoadElsewhere | None:
        """The unfinished load that a dead process left, or word of a living one. The folder is locked.

        What does not fit the image or the tier is removed, not cut short: a peer that still maps the
        file would die of SIGBUS.
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
            return OpenPart(fd, mapping, 0, is_resumed=True)
        part.unlink()
        os.close(fd)
        return None


def _new_part(part: Path, nbytes: int, evicted: int | None) -> OpenPart:
    """A file for an image, of the memory of an evicted one if nobody can see it any more. Owns `evicted`."""
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
    return OpenPart(fd, mapping, 0)
