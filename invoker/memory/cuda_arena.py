"""The arena of a CUDA node: one cudaMalloc, which RDMA and IPC can register (unlike VMM memory)."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from invoker.base.errors import SettingsError
from invoker.memory.arena import Region, SpanArena


class CudaArena(SpanArena):
    """Device memory through cupy, an optional dependency; copies run on their own stream.

    Pinned host memory is copied at the link's full rate, other memory through the driver's staging buffer.
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
                    f"cannot allocate {capacity_bytes} bytes on cuda:{device_index} ({error}): "
                    "lower --gpu-memory"
                ) from error
            self._stream = cupy.cuda.Stream(non_blocking=True)
        super().__init__(f"cuda:{device_index}", capacity_bytes, self._pointer, None)

    @property
    def device_index(self) -> int:
        return self._index

    @contextmanager
    def pinned(self, view: memoryview) -> Iterator[None]:
        """Page-lock a mapping while the block lasts."""
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
    """Return the address of a buffer, writable or not."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
