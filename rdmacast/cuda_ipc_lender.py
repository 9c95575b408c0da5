"""The GPU memory of this process that others of its host may read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rdmacast.cuda_ipc_driver import IpcDriver
from rdmacast.cuda_ipc_memory import LentMemory
from rdmacast.errors import NotShared


@dataclass(frozen=True, slots=True)
class _Allocation:
    base: int
    nbytes: int
    handle: bytes

    def covers(self, pointer: int, nbytes: int) -> bool:
        return self.base <= pointer and pointer + nbytes <= self.base + self.nbytes


class GpuLender:
    """Knows the allocations that were added, and so what a peer needs to find a range of them."""

    def __init__(self, driver: IpcDriver) -> None:
        self._driver = driver
        self._allocations: list[_Allocation] = []

    def __repr__(self) -> str:
        return f"GpuLender({len(self._allocations)} allocations)"

    @contextmanager
    def added(self, base: int, nbytes: int) -> Iterator[None]:
        """Lend the allocation of `nbytes` that begins at `base`; it is freed only after this. Raises
        DeviceError."""
        allocation = _Allocation(base, nbytes, self._driver.export(base))
        self._allocations.append(allocation)
        try:
            yield
        finally:
            self._allocations.remove(allocation)

    def lend(self, pointer: int, nbytes: int) -> LentMemory:
        """Raises NotShared."""
        for one in self._allocations:
            if one.covers(pointer, nbytes):
                return LentMemory(handle=one.handle, allocation_bytes=one.nbytes, offset=pointer - one.base)
        raise NotShared("that memory of the GPU is not lent")
