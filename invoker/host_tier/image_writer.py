"""An image on its way into the host tier."""

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from invoker.errors import HostTierFull
from invoker.host_mapping import HostMapping, close_mapping, release
from invoker.huge_pages import HUGE_PAGE, take_huge_pages
from invoker.memory import populate
from invoker.spare import OpenPart
from invoker.tier_folder import TierFolder

T = TypeVar("T")

_STEP_BYTES = 16 << 20  # to make huge pages has a price a call, too
# Where memory must be moved to make them, which takes long, the rest is taken in small ones.
_MOST_S = 0.016


class Filling:
    """An image being loaded by this process: `prepare` a range, write it into `view`; at the end
    `publish` or `abandon`. Until it is written to, a range may hold bytes of an image that was here.

    It `is_resumed` where a process that died had begun: some of the bytes may be the image's."""

    def __init__(
        self, folder: TierFolder, digest: str, part: OpenPart, nbytes: int, ended: Callable[[], None]
    ) -> None:
        self.digest = digest
        self.nbytes = nbytes
        self._folder = folder
        self._fd = part.fd
        self._mapping: mmap.mmap | None = part.mapping
        self._ready_bytes = part.ready_bytes
        self._are_huge = part.are_huge
        self._taking = threading.Lock()
        self._can_be_huge = True
        self._huge_steps: dict[int, bool] = {}
        self.is_resumed = part.is_resumed
        self._view = memoryview(b"")
        self._ended = ended

    def __repr__(self) -> str:
        return f"<Filling {self.digest[:12]} {'closed' if self._fd < 0 else 'open'}>"

    def fit(self) -> None:
        """Cut the file and its mapping to the image's size, or grow them; before anything else."""
        assert self._mapping is not None
        if 0 < self.nbytes != len(self._mapping):
            self._mapping.resize(self.nbytes)  # the file too
            # A huge page that was cut is made small ones, and mapped no more.
            last = self.nbytes // HUGE_PAGE * HUGE_PAGE
            if self.is_ready(last, self.nbytes - last):
                populate(self._mapping, last, self.nbytes - last)
        self._view = memoryview(self._mapping)[: self.nbytes]

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def path(self) -> Path:
        """The file as long as it is being filled."""
        return self._folder.part(self.digest)

    def extents(self) -> Iterator[tuple[int, int]]:
        """The ranges that have memory; a read of the others would take some, or end in SIGBUS."""
        end = 0
        while end < self.nbytes:
            try:
                start = os.lseek(self._fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return
            end = os.lseek(self._fd, start, os.SEEK_HOLE)
            yield start, end

    def is_ready(self, offset: int, nbytes: int) -> bool:
        """Whether a write to `[offset, offset + nbytes)` takes no memory and no page fault."""
        return offset + nbytes <= self._ready_bytes

    def prepare(self, offset: int, nbytes: int) -> None:
        """Take the memory of `[offset, offset + nbytes)`; blocks. Raises HostTierFull.

        A write to a page that cannot be had would kill the process by SIGBUS. Taken by ranges, the
        first bytes need not wait until all of a large image has been.
        """
        if self.is_ready(offset, nbytes):
            return
        self.takes_huge(offset, nbytes)
        self._with_spares(lambda: self._populate(offset, nbytes))

    def takes_huge(self, offset: int, nbytes: int) -> bool:
        """Whether the memory of the range lies together, in huge pages; they are taken first, if they can
        be had, and so is what lies around them. Blocks. Raises HostTierFull."""
        if self._are_huge and self.is_ready(offset, nbytes):
            return True
        steps = range(offset // _STEP_BYTES, -(-(offset + nbytes) // _STEP_BYTES))
        with self._taking:
            for step in steps:
                if step not in self._huge_steps:
                    self._huge_steps[step] = self._can_be_huge and self._take_step(step)
            return all(self._huge_steps[step] for step in steps)

    def _take_step(self, step: int) -> bool:
        start, began_s = step * _STEP_BYTES, time.monotonic()
        nbytes = min(_STEP_BYTES, self.nbytes - start)
        is_huge = self._with_spares(lambda: take_huge_pages(self._fd, start, nbytes))
        self._can_be_huge = is_huge and time.monotonic() - began_s < _MOST_S
        return is_huge

    def _populate(self, offset: int, nbytes: int) -> None:
        assert self._mapping is not None
        if not populate(self._mapping, offset, nbytes):
            os.posix_fallocate(self._fd, offset, nbytes)

    def _with_spares(self, take: Callable[[], T]) -> T:
        """Take memory, if need be that kept ready for other images. Raises HostTierFull."""
        while True:
            try:
                return take()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if not self._took_spares():
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
                    send = partial(os.sendfile, target.fileno(), source, offset, end - offset)
                    sent = self._with_spares(send)
                    if not sent:
                        return False
                    offset += sent
        except OSError:
            return False
        return True

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes to their place; blocks. Raises HostTierFull. It clears no memory, as `receive`."""
        if self.is_ready(offset, len(data)):
            np.copyto(
                np.frombuffer(self._view[offset : offset + len(data)], np.uint8),
                np.frombuffer(data, np.uint8),
            )
            return
        done = 0
        while done < len(data):
            done += self._with_spares(partial(os.pwrite, self._fd, data[done:], offset + done))

    def _took_spares(self) -> bool:
        """Whether there was memory kept ready for other images, which is free now."""
        with self._folder.locked():
            found = self._folder.spare_bytes()
            self._folder.discard_spares()
        return found > 0

    def _full(self) -> HostTierFull:
        return HostTierFull(
            f"{self._folder.path} ran full: image {self.digest[:12]} of {self.nbytes} bytes does not "
            f"fit in shared memory (make it larger or lower --host-memory)"
        )

    def publish(self) -> HostMapping:
        """Make the image visible to the host, atomically; it stays mapped for the caller, and `view` goes."""
        assert self._mapping is not None
        final = self._folder.image(self.digest)
        with self._folder.locked():
            self.path.rename(final)
            os.utime(final)
            # Lets waiting processes go on. Converting a lock is not atomic, but eviction, which could
            # slip in between, happens under the folder's lock only.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        fd, self._fd = self._fd, -1
        mapping, self._mapping = self._mapping, None
        release(self._view)
        self._ended()
        return HostMapping(final, fd, mapping, self.nbytes)

    def abandon(self) -> None:
        """Drop what was loaded. Idempotent, and without effect after `publish`."""
        if self._fd < 0:
            return
        with self._folder.locked():
            self.path.unlink(missing_ok=True)
            fd, self._fd = self._fd, -1
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        mapping, self._mapping = self._mapping, None
        release(self._view)
        close_mapping(mapping)
        self._ended()


@dataclass(frozen=True, slots=True)
class LoadElsewhere:
    """Another process of the host is loading the image; give it to `HostTier.wait`, or `close` it."""

    fd: int

    def close(self) -> None:
        os.close(self.fd)
