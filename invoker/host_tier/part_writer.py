"""The memory of a part of an image: of one process, outside the host tier, and only as large as the part."""

import os
from collections.abc import Iterator
from pathlib import Path

from invoker.host_tier.buffer_pool import PartialFile
from invoker.host_tier.folder import TierFolder
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.mapping import HostMapping, close_mapping, map_file, release


class PartWriter(ImageWriter):
    """A writer whose `view` has the size of the image, but memory only where it was written.

    No other process sees it, so it is never published, and it does not count against the tier's limit.
    Raises OSError.
    """

    def __init__(self, folder: TierFolder, digest: str, nbytes: int) -> None:
        fd = os.memfd_create(f"part-{digest[:12]}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            part = PartialFile(fd, map_file(fd, nbytes), 0)
        except BaseException:
            os.close(fd)
            raise
        super().__init__(folder, digest, part, nbytes, lambda: None)
        self._can_be_huge = False  # these are populated with their surroundings
        self.fit()

    @property
    def path(self) -> Path:
        return Path(f"/proc/self/fd/{self._fd}")

    def extents(self) -> Iterator[tuple[int, int]]:
        return iter(())

    def publish(self) -> HostMapping:
        raise AssertionError("a part of an image is not published")

    def abandon(self) -> None:
        """Free the memory. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        os.close(fd)
        mapping, self._mapping = self._mapping, None
        release(self._view)
        close_mapping(mapping)
