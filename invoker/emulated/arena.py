"""The memory of an emulated accelerator: real bytes, filled at the rate of its link."""

import mmap

from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.profiles import find_device
from invoker.memory.arena import COPY_CHUNK_BYTES, HostArena, Region
from invoker.memory.mappings import address_of
from registry.config.emulation import EmulatedDevice
from registry.images.manifest import UNIT_BYTES


class EmulatedArena(HostArena):
    """An Arena in host memory, the pages of which are allocated as they are written."""

    def __init__(self, device: EmulatedDevice, capacity_bytes: int, clock: DeviceClock | None = None) -> None:
        self._mapping = mmap.mmap(-1, max(mmap.PAGESIZE, capacity_bytes))
        super().__init__(str(device), capacity_bytes, address_of(self._mapping), memoryview(self._mapping))
        _, links = find_device(device)
        self._bytes_per_s = links.host / device.scale
        self._clock = clock or DeviceClock(device.slower)
        # The same fraction of the image as a real device copies at once, at least one unit.
        self.copy_bytes = max(UNIT_BYTES, COPY_CHUNK_BYTES // device.scale)

    def fill(self, region: Region, offset: int, lent: memoryview) -> None:
        """Take as long as the copy from page-locked memory to the device."""
        self._clock.run(len(lent) / self._bytes_per_s)
