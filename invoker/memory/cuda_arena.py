"""The arena of a CUDA node: one cudaMalloc, which RDMA and IPC can register (unlike VMM memory)."""

from typing import Any

import numpy as np

from invoker.base.errors import SettingsError
from invoker.memory.staged_arena import PINNED_BYTES, StagedArena

_PORTABLE = 1  # cudaHostAllocPortable: page-locked for all devices of the process


class CudaDriver:
    """A DeviceDriver through cupy, an optional dependency; copies run on two streams of their own."""

    def __init__(self, device_index: int) -> None:
        """Open the device. Raises SettingsError without cupy."""
        try:
            import cupy
        except ImportError as error:
            raise SettingsError(
                "--device cuda needs cupy: pip install 'hypercast[gpu]' (or [gpu13] for CUDA 13)"
            ) from error
        self._cupy: Any = cupy
        self._index = device_index
        with cupy.cuda.Device(device_index):
            self._in: Any = cupy.cuda.Stream(non_blocking=True)
            self._out: Any = cupy.cuda.Stream(non_blocking=True)

    @property
    def device(self) -> str:
        return f"cuda:{self._index}"

    def allocate(self, nbytes: int) -> int:
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self._index):
            try:
                return int(runtime.malloc(nbytes))
            except runtime.CUDARuntimeError as error:
                raise SettingsError(
                    f"cannot allocate {nbytes} bytes on {self.device} ({error}): lower --gpu-memory"
                ) from error

    def free(self, pointer: int) -> None:
        with self._cupy.cuda.Device(self._index):
            self._cupy.cuda.runtime.free(pointer)

    def allocate_pinned(self, nbytes: int) -> memoryview:
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self._index):
            try:
                memory = self._cupy.cuda.PinnedMemory(nbytes, _PORTABLE)
            except runtime.CUDARuntimeError as error:
                raise SettingsError(
                    f"cannot page-lock {nbytes} bytes of host memory for {self.device} ({error})"
                ) from error
        pointer = self._cupy.cuda.PinnedMemoryPointer(memory, 0)
        return np.frombuffer(pointer, np.uint8, nbytes).data

    def copy_in(self, pointer: int, data: memoryview) -> None:
        self._copy(pointer, _address(data), len(data), self._cupy.cuda.runtime.memcpyHostToDevice, self._in)

    def copy_out(self, into: memoryview, pointer: int) -> None:
        self._copy(_address(into), pointer, len(into), self._cupy.cuda.runtime.memcpyDeviceToHost, self._out)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: Any) -> None:
        with self._cupy.cuda.Device(self._index):
            self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)
            stream.synchronize()


class CudaArena(StagedArena):
    """Device memory through cupy."""

    def __init__(self, device_index: int, capacity_bytes: int, *, pinned_bytes: int = PINNED_BYTES) -> None:
        """Allocate it. Raises SettingsError."""
        super().__init__(CudaDriver(device_index), capacity_bytes, pinned_bytes=pinned_bytes)
        self.device_index = device_index


def _address(view: memoryview) -> int:
    """Return the address of a buffer, writable or not."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
