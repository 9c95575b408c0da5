"""Regions whose bytes may lie in the memory of a GPU."""

from typing import Protocol, runtime_checkable

from rdmacast.transport import RegionSource


@runtime_checkable
class GpuSource(Protocol):
    """A region that knows where on a GPU it is. Asked only for what its `wait_for` has promised."""

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        """The device pointer of the range; None where it is not on a GPU, or the processor has it too."""
        ...


def gpu_pointer(source: RegionSource, offset: int, nbytes: int) -> int | None:
    """Where on a GPU the range is, if anywhere."""
    return source.gpu_pointer(offset, nbytes) if isinstance(source, GpuSource) else None
