"""The seam to a device whose memory the CPU cannot address."""

from typing import Protocol


class DeviceDriver(Protocol):
    """Memory of one device, and page-locked host memory. All methods block, and run in any thread.

    They raise SettingsError if memory cannot be allocated; copies are finished when they return.
    """

    @property
    def device(self) -> str: ...

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory of the device."""
        ...

    def free(self, pointer: int) -> None: ...

    def allocate_pinned(self, nbytes: int) -> memoryview:
        """Return new page-locked host memory, freed with its last view."""
        ...

    def copy_in(self, pointer: int, data: memoryview) -> None:
        """Copy host memory to the device."""
        ...

    def copy_out(self, into: memoryview, pointer: int) -> None:
        """Copy the device's memory to the host."""
        ...
