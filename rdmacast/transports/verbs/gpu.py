"""GPU memory as a dma-buf, which an RDMA device can register; needs only NVIDIA's driver library."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rdmacast.errors import DeviceError

_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: copies are done when their calls return
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


@contextmanager
def exported(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield a file descriptor, open only inside, and the offset of the device pointer's memory in it.

    Raises DeviceError.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver here: {error}") from error
    one = ctypes.c_uint(1)
    _checked(driver, "cuPointerSetAttribute", ctypes.byref(one), _SYNC_MEMOPS, ctypes.c_uint64(address))
    start = address - address % mmap.PAGESIZE
    end = address + nbytes + -(address + nbytes) % mmap.PAGESIZE
    file = ctypes.c_int(-1)
    _checked(
        driver,
        "cuMemGetHandleForAddressRange",
        ctypes.byref(file),
        ctypes.c_uint64(start),
        ctypes.c_size_t(end - start),
        _DMA_BUF_FD,
        ctypes.c_uint64(0),
    )
    try:
        yield file.value, address - start
    finally:
        os.close(file.value)


def _checked(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        code = getattr(driver, name)(*arguments)
    except AttributeError as error:
        raise DeviceError(f"the NVIDIA driver is too old: it has no {name}") from error
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise DeviceError(f"{name}: {(text.value or b'error').decode()} ({code})")
