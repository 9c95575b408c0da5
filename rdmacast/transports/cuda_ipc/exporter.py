"""The serving end of reads by CUDA IPC: allocations of this process that others of its host may open."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rdmacast.errors import NotShared
from rdmacast.exporter import ExportedRange, StatelessExporter
from rdmacast.gpu_source import gpu_pointer
from rdmacast.transports.cuda_ipc.driver import IpcDriver
from rdmacast.transports.cuda_ipc.memory import CudaIpcMemory


@dataclass(frozen=True, slots=True)
class _ExportedAllocation:
    base: int
    nbytes: int
    handle: bytes

    def covers(self, pointer: int, nbytes: int) -> bool:
        return self.base <= pointer and pointer + nbytes <= self.base + self.nbytes


class CudaIpcExporter(StatelessExporter):
    """An Exporter of GPU memory in the allocations that were added."""

    name = "cuda_ipc"

    def __init__(self, driver: IpcDriver) -> None:
        self._driver = driver
        self._allocations: list[_ExportedAllocation] = []

    def __repr__(self) -> str:
        return f"CudaIpcExporter({len(self._allocations)} allocations)"

    @contextmanager
    def added(self, base: int, nbytes: int) -> Iterator[None]:
        """Export the allocation of `nbytes` that begins at `base`; it must not be freed inside.

        Raises DeviceError.
        """
        allocation = _ExportedAllocation(base, nbytes, self._driver.export(base))
        self._allocations.append(allocation)
        try:
            yield
        finally:
            self._allocations.remove(allocation)

    def lookup(self, pointer: int, nbytes: int) -> CudaIpcMemory:
        """Return the description of a range of device memory. Raises NotShared."""
        for known in self._allocations:
            if known.covers(pointer, nbytes):
                return CudaIpcMemory(
                    handle=known.handle, allocation_bytes=known.nbytes, offset=pointer - known.base
                )
        raise NotShared("that memory of the GPU is not exported")

    @contextmanager
    def export(self, exported: ExportedRange) -> Iterator[bytes]:
        """Describe the range. Raises NotShared if it is not in an exported allocation."""
        pointer = gpu_pointer(exported.source, exported.offset, exported.nbytes)
        if pointer is None:
            raise NotShared(f"region {exported.region} is not on a GPU")
        yield self.lookup(pointer, exported.nbytes).encode()
