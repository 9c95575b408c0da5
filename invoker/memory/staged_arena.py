"""Arenas of devices that the CPU cannot address: filled and read through page-locked host memory."""

from contextlib import AbstractAsyncContextManager

from invoker.memory.arena import Region, SpanArena
from invoker.memory.device_driver import DeviceDriver
from invoker.memory.pinned_pool import PinnedPool

PINNED_BYTES = 1 << 30
_COPIES_IN_FLIGHT = 4  # the processor copies into some ranges while the device reads others
_SENT_SHARE = 4  # 1/_SENT_SHARE is for reads of the arena: slow peers cannot hold up a start


class StagedArena(SpanArena):
    """One allocation of a device until it is closed, and `pinned_bytes` of page-locked host memory.

    Nothing is page-locked or registered at a start: what arrives, or lies in host memory, reaches the device
    through ranges of that memory.
    """

    copies_in_flight = _COPIES_IN_FLIGHT

    def __init__(
        self, driver: DeviceDriver, capacity_bytes: int, *, pinned_bytes: int = PINNED_BYTES
    ) -> None:
        """Allocate both. Raises SettingsError."""
        self._driver = driver
        pointer = driver.allocate(capacity_bytes)
        try:
            self.pinned = driver.allocate_pinned(pinned_bytes)
        except BaseException:
            driver.free(pointer)
            raise
        super().__init__(driver.device, capacity_bytes, pointer, None)
        sent = len(self.pinned) // _SENT_SHARE
        self._outgoing = PinnedPool(self.pinned[:sent])
        self._incoming = PinnedPool(self.pinned[sent:])

    def lend(self, region: Region, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        return self._incoming.lend(nbytes)

    def prepare(self, region: Region, offset: int, nbytes: int) -> None:
        """Do nothing: page-locked memory has its pages."""

    def fill(self, region: Region, offset: int, lent: memoryview) -> None:
        self._driver.copy_in(region.pointer + offset, lent)

    def copy_out(self, region: Region, offset: int, into: memoryview) -> None:
        self._driver.copy_out(into, region.pointer + offset)

    def staging(self, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        return self._outgoing.lend(nbytes)

    def close(self) -> None:
        self._driver.free(self._base)
