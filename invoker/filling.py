"""An image on its way into the host tier."""

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from invoker.errors import HostTierFull
from invoker.host_mapping import HostMapping, close_mapping, release
from invoker.memory import populate
from invoker.tier_folder import TierFolder


class Filling:
    """An image being loaded by this process: `prepare` a range, write it into `view`; at the end
    `publish` or `abandon`."""

    def __init__(self, folder: TierFolder, digest: str, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        self.digest = digest
        self.nbytes = nbytes
        self._folder = folder
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
        return self._folder.part(self.digest)

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


@dataclass(frozen=True, slots=True)
class LoadElsewhere:
    """Another process of the host is loading the image; give it to `HostTier.wait`, or `close` it."""

    fd: int

    def close(self) -> None:
        os.close(self.fd)
