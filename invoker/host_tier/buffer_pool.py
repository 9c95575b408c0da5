"""Pre-faulted shared memory for the next image: a load into it clears no pages and takes no page faults.

A spare buffer is a file of the host tier, `<random>.spare`, mapped and populated in small steps by its
process. It counts against the tier's limit, but any process that needs the room for an image truncates and
removes it, at any time. That is safe because the mapping of a spare buffer is neither read nor written.
"""

import fcntl
import logging
import mmap
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from invoker.host_tier.folder import TierFolder, truncate_and_remove
from invoker.memory.huge_pages import populate_huge_pages
from invoker.memory.mappings import GENTLE_STEP_BYTES, advise_huge, populate, run_gently

MIN_BYTES = 1 << 20  # of a spare buffer
LARGEST_SHARE = 2  # a smaller image than 1/LARGEST_SHARE of the buffer leaves it for another one
_HUGE_STEP_BYTES = 16 << 20  # per call: MADV_COLLAPSE has a fixed cost
_STOP_S = 0.02  # for the step in progress; the thread may not be scheduled

log = logging.getLogger("invoker.spare")


@dataclass(frozen=True, slots=True)
class PartialFile:
    """The open, locked and mapped file of a partial image; its first `ready_bytes` are populated.

    `are_huge` if these are all huge pages. `is_resumed` if a dead process had started to load the same image
    into it.
    """

    fd: int
    mapping: mmap.mmap
    ready_bytes: int
    are_huge: bool = False
    is_resumed: bool = False


class SpareBuffer:
    """A pre-faulted file for the next image. Created, examined and taken with the folder locked."""

    def __init__(self, folder: TierFolder, nbytes: int) -> None:
        """Start populating. Raises OSError, or RuntimeError if no thread can be started."""
        self.nbytes = nbytes
        self.ready_bytes = 0
        self._are_huge = True
        self._path = folder.spare(secrets.token_hex(8))
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._stop = threading.Event()
        own = os.dup(self._fd)
        self._thread = threading.Thread(
            target=self._populate, args=(own,), name="spare-prefault", daemon=True
        )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.ftruncate(self._fd, nbytes)
            self._mapping = mmap.mmap(self._fd, nbytes)
            advise_huge(self._mapping)
            self._thread.start()
        except BaseException:
            os.close(own)
            self._remove()
            raise

    def __repr__(self) -> str:
        return f"<SpareBuffer {self.ready_bytes} of {self.nbytes} bytes{'' if self.exists else ', removed'}>"

    @property
    def exists(self) -> bool:
        """Return whether the file has not been removed or taken."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def fits(self, nbytes: int) -> bool:
        """Return whether an image of `nbytes` should use it; the rest of the buffer is lost."""
        return self.exists and nbytes * LARGEST_SHARE >= self.nbytes

    def take(self, part: Path, nbytes: int) -> PartialFile | None:
        """Make it the file of an image, and return that; None if it is not usable. Consumes the buffer.

        The caller truncates the file once the folder is unlocked: that takes as long as reading a third as
        much.
        """
        self._stop.set()
        self._thread.join(_STOP_S)
        if self._thread.is_alive() or not self.exists:
            self.discard()
            return None
        try:
            if nbytes > self.nbytes:
                os.ftruncate(self._fd, nbytes)
            self._path.rename(part)
        except OSError as error:
            log.warning("cannot use the pre-faulted buffer for an image: %s", error)
            self.discard()
            return None
        fd, self._fd = self._fd, -1
        return PartialFile(fd, self._mapping, min(self.ready_bytes, nbytes), self._are_huge)

    def discard(self) -> None:
        """Remove the file and free its memory. Idempotent, and without effect after `take`."""
        self._stop.set()
        if self._fd >= 0:
            self._remove()

    def wait(self) -> None:
        """Block until the buffer is populated or discarded."""
        self._thread.join()

    def _remove(self) -> None:
        fd, self._fd = self._fd, -1
        truncate_and_remove(self._path, fd)
        os.close(fd)

    def _populate(self, fd: int) -> None:
        """Populate the file through `fd`, which it owns: the buffer's own may be closed at any time."""

        def take(offset: int) -> int:
            step = min(_HUGE_STEP_BYTES, self.nbytes - offset)
            self._are_huge = self._are_huge and populate_huge_pages(fd, offset, step)
            if not self._are_huge:
                step = min(GENTLE_STEP_BYTES, step)
            if not populate(self._mapping, offset, step):
                return 0
            self.ready_bytes = offset + step
            return step

        try:
            run_gently(take, self.nbytes, self._stop)
        except OSError as error:
            # The room was needed for an image, or less memory was free than reported.
            log.info(
                "pre-faulted buffer: stopped at %d of %d bytes: %s", self.ready_bytes, self.nbytes, error
            )
        finally:
            os.close(fd)
