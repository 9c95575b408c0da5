"""The file of an image being loaded into the host tier."""

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from invoker.base.errors import HostTierFull
from invoker.host_tier.buffer_pool import PartialFile
from invoker.host_tier.folder import TierFolder, inodes, mark, rejected, verified
from invoker.host_tier.mapping import HostMapping, close_mapping, release
from invoker.memory.huge_pages import HUGE_PAGE, populate_huge_pages
from invoker.memory.mappings import populate

T = TypeVar("T")

_STEP_BYTES = 16 << 20  # per call: MADV_COLLAPSE has a fixed cost
# Beyond, memory is being compacted for huge pages, and the rest is populated with small ones.
_MAX_COMPACTION_S = 0.016


class ImageWriter:
    """A writer of an image: `prepare` a range, fill it in `view`; at the end `publish` or `abandon`.

    Ranges that are not written yet may contain bytes of an evicted image. `is_resumed` if a dead process had
    started to load this image: some bytes may be valid.
    """

    region = None  # of an arena

    def __init__(
        self, folder: TierFolder, digest: str, part: PartialFile, nbytes: int, on_end: Callable[[], None]
    ) -> None:
        self.digest = digest
        self.nbytes = nbytes
        self._folder = folder
        self._fd = part.fd
        self._mapping: mmap.mmap | None = part.mapping
        self._ready_bytes = part.ready_bytes
        self._are_huge = part.are_huge
        self._populating = threading.Lock()
        self._can_be_huge = True
        self._huge_steps: dict[int, bool] = {}
        self.is_resumed = part.is_resumed
        self._view = memoryview(b"")
        self._on_end = on_end

    def __repr__(self) -> str:
        return f"<ImageWriter {self.digest[:12]} {'closed' if self._fd < 0 else 'open'}>"

    def fit(self) -> None:
        """Resize the file and its mapping to the image's size; called before any other method."""
        assert self._mapping is not None
        if 0 < self.nbytes != len(self._mapping):
            self._mapping.resize(self.nbytes)  # the file too
            # A truncated huge page is split into small ones, which are unmapped.
            last = self.nbytes // HUGE_PAGE * HUGE_PAGE
            if self.is_ready(last, self.nbytes - last):
                populate(self._mapping, last, self.nbytes - last)
        self._view = memoryview(self._mapping)[: self.nbytes]

    @property
    def view(self) -> memoryview:
        return self._view

    @property
    def path(self) -> Path:
        """Return the path of the partial file."""
        return self._folder.part(self.digest)

    def wanted(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the range: all of the image is wanted."""
        return offset, nbytes

    @asynccontextmanager
    async def lend(self, offset: int, nbytes: int) -> AsyncIterator[memoryview]:
        """Lend a writable view of the range, to be prepared before it is written."""
        view = self._view[offset : offset + nbytes]
        try:
            yield view
        finally:
            release(view)

    async def keep(self, offset: int, view: memoryview) -> None:
        """Do nothing: the bytes are in their place."""

    def staged(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend the range itself, which can be viewed."""
        return self.lend(offset, nbytes)

    def reopen(self) -> int:
        """Return a new descriptor of the partial file, for reading."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def extents(self) -> Iterator[tuple[int, int]]:
        """Yield the populated ranges; reading others would allocate memory or raise SIGBUS."""
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
        """Return whether a write to `[offset, offset + nbytes)` causes no allocation or page fault."""
        return offset + nbytes <= self._ready_bytes

    def prepare(self, offset: int, nbytes: int) -> None:
        """Populate `[offset, offset + nbytes)`; blocks. Raises HostTierFull.

        A write to a page without memory would kill the process by SIGBUS. By ranges, so that the first bytes
        of a large image need not wait for all of it.
        """
        if self.is_ready(offset, nbytes):
            return
        self.populate_huge(offset, nbytes)
        self._retry_without_spares(lambda: self._populate(offset, nbytes))

    def populate_huge(self, offset: int, nbytes: int) -> bool:
        """Populate the range and its surroundings with huge pages if possible; return whether they are huge.

        Blocks. Raises HostTierFull.
        """
        if self._are_huge and self.is_ready(offset, nbytes):
            return True
        steps = range(offset // _STEP_BYTES, -(-(offset + nbytes) // _STEP_BYTES))
        with self._populating:
            for step in steps:
                if step not in self._huge_steps:
                    self._huge_steps[step] = self._can_be_huge and self._populate_step(step)
            return all(self._huge_steps[step] for step in steps)

    def _populate_step(self, step: int) -> bool:
        start, started_s = step * _STEP_BYTES, time.monotonic()
        nbytes = min(_STEP_BYTES, self.nbytes - start)
        is_huge = self._retry_without_spares(lambda: populate_huge_pages(self._fd, start, nbytes))
        self._can_be_huge = is_huge and time.monotonic() - started_s < _MAX_COMPACTION_S
        return is_huge

    def _populate(self, offset: int, nbytes: int) -> None:
        assert self._mapping is not None
        if not populate(self._mapping, offset, nbytes):
            os.posix_fallocate(self._fd, offset, nbytes)

    def _retry_without_spares(self, take: Callable[[], T]) -> T:
        """Run `take`, removing spare buffers if memory runs out. Raises HostTierFull."""
        while True:
            try:
                return take()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                if not self._freed_spares():
                    raise self._full() from error

    def receive(self, offset: int, nbytes: int, source: int) -> bool:
        """Copy a range of an open file to the same offset; blocks. Raises HostTierFull.

        Unlike `prepare` it allocates memory without clearing it. Return False if the file cannot be copied
        this way; reading it will show the error.
        """
        end = offset + nbytes
        try:
            with self.path.open("r+b", buffering=0) as target:
                target.seek(offset)
                while offset < end:
                    send = partial(os.sendfile, target.fileno(), source, offset, end - offset)
                    sent = self._retry_without_spares(send)
                    if not sent:
                        return False
                    offset += sent
        except OSError:
            return False
        return True

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` to `offset`, without clearing memory first; blocks. Raises HostTierFull."""
        if self.is_ready(offset, len(data)):
            np.copyto(
                np.frombuffer(self._view[offset : offset + len(data)], np.uint8),
                np.frombuffer(data, np.uint8),
            )
            return
        written = 0
        while written < len(data):
            written += self._retry_without_spares(
                partial(os.pwrite, self._fd, data[written:], offset + written)
            )

    def _freed_spares(self) -> bool:
        """Remove spare buffers; return whether there were any."""
        with self._folder.locked():
            found = self._folder.spare_bytes()
            self._folder.discard_spares()
        return found > 0

    def _full(self) -> HostTierFull:
        return HostTierFull(
            f"{self._folder.path} is full: image {self.digest[:12]} of {self.nbytes} bytes does not "
            f"fit in shared memory (make it larger or lower --host-memory)"
        )

    def publish(self) -> HostMapping:
        """Make the image visible to the host, atomically; return its mapping. Releases `view`."""
        assert self._mapping is not None
        final = self._folder.image(self.digest)
        with self._folder.locked():
            verified(final).unlink(missing_ok=True)
            if (inode := os.fstat(self._fd).st_ino) in (known := inodes(rejected(final))):
                mark(rejected(final), known - {inode})  # the file system has used the number again
            self.path.rename(final)
            os.utime(final)
            # Wakes waiting processes. Converting a flock is not atomic, but eviction, which could come
            # between,
            # requires the folder's lock.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        fd, self._fd = self._fd, -1
        mapping, self._mapping = self._mapping, None
        release(self._view)
        self._on_end()
        return HostMapping(final, fd, mapping, self.nbytes)

    def abandon(self) -> None:
        """Remove the file. Idempotent, and without effect after `publish`."""
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
        self._on_end()


@dataclass(frozen=True, slots=True)
class LoadElsewhere:
    """An image being loaded by another process of the host; pass it to `HostTier.wait`, or `close` it."""

    fd: int

    def close(self) -> None:
        os.close(self.fd)
