"""CUDA IPC through cupy, which is optional: imported only here, when a driver is made.

What of this has run, and where, is in docs/OPERATIONS.md ("RDMA and other transports").
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rdmacast.errors import DeviceError

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: the memory may be another GPU's
_ANY_TO_ANY = 4  # cudaMemcpyDefault: the addresses show where memory is


class CupyDriver:
    """An IpcDriver of one GPU. Copies run on a stream of their own."""

    def __init__(self, device_index: int) -> None:
        """Open the GPU. Raises DeviceError if cupy or the GPU cannot be used."""
        try:
            import cupy
        except ImportError as error:
            raise DeviceError(f"cupy cannot be imported: {error}") from error
        self._cupy: Any = cupy
        self._index = device_index
        with self._device(f"no GPU {device_index}"):
            self._stream: Any = cupy.cuda.Stream(non_blocking=True)

    def __repr__(self) -> str:
        return f"CupyDriver(cuda:{self._index})"

    def export(self, base: int) -> bytes:
        with self._device("no handle for the allocation"):
            return bytes(self._cupy.cuda.runtime.ipcGetMemHandle(base))

    def open(self, handle: bytes) -> int:
        with self._device("cannot open the allocation"):
            return int(self._cupy.cuda.runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))

    def close(self, base: int) -> None:
        with self._device("cannot close the allocation"):
            self._cupy.cuda.runtime.ipcCloseMemHandle(base)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        with self._device("cannot copy"):
            self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, _ANY_TO_ANY, self._stream.ptr)
            self._stream.synchronize()

    @contextmanager
    def _device(self, what: str) -> Iterator[None]:
        """Select the GPU for this thread inside, and translate the driver's errors to DeviceError."""
        try:
            with self._cupy.cuda.Device(self._index):
                yield
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"{what}: {error}") from error
