"""The disk of an emulated node: blobs of a folder on this machine, read at the disk's rate."""

from pathlib import Path

from invoker.emulated.device_clock import DeviceClock
from registry.images.local_reader import LocalReader


class EmulatedDiskReader(LocalReader):
    """A LocalReader, each read of which lasts until the disk, shared by all readers, has finished it."""

    def __init__(self, path: Path, clock: DeviceClock, bytes_per_s: float) -> None:
        super().__init__(path)
        self._clock = clock
        self._bytes_per_s = bytes_per_s

    @property
    def is_direct(self) -> bool:
        return False

    def cached(self, offset: int, nbytes: int) -> int | None:
        """Return None: what this machine caches of its files, the emulated one does not."""
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into`: see BlobReader."""
        super().read_into(offset, into)
        self._clock.run(len(into) / self._bytes_per_s)
