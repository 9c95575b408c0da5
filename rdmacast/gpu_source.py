"""Regions whose bytes may be in GPU memory."""

from typing import Protocol, runtime_checkable

from rdmacast.transport import RegionSource


@runtime_checkable
class GpuSource(Protocol):
    """A region that knows its place in GPU memory."""

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        """Return the device pointer of a range that `wait_for` has promised.

        None if the range is not on a GPU, or is in host memory as well.
        """
        ...


def gpu_pointer(source: RegionSource, offset: int, nbytes: int) -> int | None:
    """Return the device pointer of the range, or None if it has none."""
    return source.gpu_pointer(offset, nbytes) if isinstance(source, GpuSource) else None
