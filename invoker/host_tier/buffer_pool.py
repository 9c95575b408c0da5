"""Shared memory kept ready for the next image: a load into it clears no page and takes no page fault.

A spare is a file of the host tier, `<random>.spare`, that its process has mapped and of which it takes
the pages little by little. It counts against the tier's limit, but gives way
to any image: whoever needs the room, in whatever process, cuts the file short and removes it. That may
happen at any time, and hurts nobody, since nobody reads or writes the mapping of a spare.
"""

import fcntl
import logging
import mmap
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from invoker.huge_pages import take_huge_pages
from invoker.memory import GENTLE_STEP_BYTES, advise_huge, populate, take_gently
from invoker.tier_folder import TierFolder, cut_and_remove

LEAST_BYTES = 1 << 20  # less is not worth a file
LARGEST_SHARE = 2  # an image of less than one part in so many takes fresh memory and leaves the spare
_HUGE_STEP_BYTES = 16 << 20  # to make huge pages has a price a call, too
_STOP_S = 0.02  # for the few pages that are being taken; the thread may not get the processor

log = logging.getLogger("invoker.spare")


@dataclass(frozen=True, slots=True)
class OpenPart:
    """The open, locked and mapped file of an image to be loaded; of `ready_bytes` the pages are there.

    These `are_huge` if all are huge pages. It `is_resumed` where a process that died had begun to load the
    same image into it.
    """

    fd: int
    mapping: mmap.mmap
    ready_bytes: int
    are_huge: bool = False
    is_resumed: bool = False


class Spare:
    """This process's spare. It is made, looked at and taken with the folder locked."""

    def __init__(self, folder: TierFolder, nbytes: int) -> None:
        """Begin to take the memory. Raises OSError, or RuntimeError where no thread can be had."""
        self.nbytes = nbytes
        self.ready_bytes = 0
        self._are_huge = True
        self._path = folder.spare(secrets.token_hex(8))
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._stop = threading.Event()
        own = os.dup(self._fd)
        self._thread = threading.Thread(
            target=self._take_pages, args=(own,), name="spare-prefault", daemon=True
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
        return f"<Spare {self.ready_bytes} of {self.nbytes} bytes{'' if self.is_there else ', gone'}>"

    @property
    def is_there(self) -> bool:
        """Whether nobody needed its room so far."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink > 0

    def suits(self, nbytes: int) -> bool:
        """Whether an image of that size should take it: what is too much of it is lost."""
        return self.is_there and nbytes * LARGEST_SHARE >= self.nbytes

    def take(self, part: Path, nbytes: int) -> OpenPart | None:
        """Make it the file of an image; this spare is gone then. None if it cannot be had.

        What there is too much of it, the caller cuts off, when the folder is no longer locked: that is as
        much work as reading a third as much.
        """
        self._stop.set()
        self._thread.join(_STOP_S)
        if self._thread.is_alive() or not self.is_there:
            self.discard()
            return None
        try:
            if nbytes > self.nbytes:
                os.ftruncate(self._fd, nbytes)
            self._path.rename(part)
        except OSError as error:
            log.warning("the memory kept ready for an image is not taken for it: %s", error)
            self.discard()
            return None
        fd, self._fd = self._fd, -1
        return OpenPart(fd, self._mapping, min(self.ready_bytes, nbytes), self._are_huge)

    def discard(self) -> None:
        """Give its memory back. Idempotent, and without effect after `take`."""
        self._stop.set()
        if self._fd >= 0:
            self._remove()

    def wait(self) -> None:
        """Block until no more pages are being taken: all are there, or it was discarded."""
        self._thread.join()

    def _remove(self) -> None:
        fd, self._fd = self._fd, -1
        cut_and_remove(self._path, fd)
        os.close(fd)

    def _take_pages(self, fd: int) -> None:
        """Owns `fd`, since the spare's own may be closed at any time."""

        def take(offset: int) -> int:
            step = min(_HUGE_STEP_BYTES, self.nbytes - offset)
            self._are_huge = self._are_huge and take_huge_pages(fd, offset, step)
            if not self._are_huge:
                step = min(GENTLE_STEP_BYTES, step)
            if not populate(self._mapping, offset, step):
                return 0
            self.ready_bytes = offset + step
            return step

        try:
            take_gently(take, self.nbytes, self._stop)
        except OSError as error:
            # Somebody else needed the room, or there is less memory than there seemed to be.
            log.info("a spare of %d bytes ended at %d: %s", self.nbytes, self.ready_bytes, error)
        finally:
            os.close(fd)
