"""The arena of a CUDA node: one plain cudaMalloc, which RDMA and IPC can register (VMM memory cannot)."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from invoker.arena import Region, SpanArena
from invoker.errors import SettingsError


class CudaArena(SpanArena):
    """Device memory through cupy, an optional dependency; copies run on a stream of their own.

    Host memory that is `pinned` is copied at the link's full rate; other memory through the driver's
    own staging buffer.
    """

    def __init__(self, device_index: int, capacity_bytes: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise SettingsError(
                "--device cuda needs cupy: pip install 'hypercast[gpu]' (or [gpu13] for CUDA 13)"
            ) from error
        self._cupy = cupy
        self._index = device_index
        with cupy.cuda.Device(device_index):
            try:
                self._pointer = int(cupy.cuda.runtime.malloc(capacity_bytes))
            except cupy.cuda.runtime.CUDARuntimeError as error:
                raise SettingsError(
                    f"cannot take {capacity_bytes} bytes of cuda:{device_index} ({error}): lower --gpu-memory"
                ) from error
            self._stream = cupy.cuda.Stream(non_blocking=True)
        super().__init__(f"cuda:{device_index}", capacity_bytes, self._pointer, None)

    @property
    def device_index(self) -> int:
        return self._index

    @contextmanager
    def pinned(self, view: memoryview) -> Iterator[None]:
        """Page-lock a mapping while it is copied from, for the link's full rate."""
        address, runtime = _address(view), self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self._index):
            runtime.hostRegister(address, len(view), 0)
        try:
            yield
        finally:
            with self._cupy.cuda.Device(self._index):
                runtime.hostUnregister(address)

    def copy_in(self, region: Region, offset: int, data: memoryview) -> None:
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self._index):
            runtime.memcpyAsync(
                region.pointer + offset,
                _address(data),
                len(data),
                runtime.memcpyHostToDevice,
                self._stream.ptr,
            )
            self._stream.synchronize()

    def close(self) -> None:
        with self._cupy.cuda.Device(self._index):
            self._cupy.cuda.runtime.free(self._pointer)


def _address(view: memoryview) -> int:
    """Where a buffer lies, writable or not."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
