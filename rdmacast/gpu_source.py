"""Regions whose bytes may be in GPU memory."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from rdmacast.transport import RegionSource

STAGED_BYTES = 4 << 20  # copied from a GPU at once


@runtime_checkable
class GpuSource(Protocol):
    """A region that knows its place in GPU memory."""

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        """Return the device pointer of a range that `wait_for` has promised.

        None if the range is not on a GPU, or is in host memory as well.
        """
        ...

    def staged(self, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        """Lend a copy of such a range (at most STAGED_BYTES) in host memory. Raises RegionGone."""
        ...


def gpu_pointer(source: RegionSource, offset: int, nbytes: int) -> int | None:
    """Return the device pointer of the range, or None if it has none."""
    return source.gpu_pointer(offset, nbytes) if isinstance(source, GpuSource) else None


async def host_views(
    source: RegionSource, offset: int, nbytes: int, view: memoryview | None
) -> AsyncGenerator[memoryview, None]:
    """Yield a range in host memory: its `view`, or else copies of its pieces, each until the next one.

    Raises RegionGone.
    """
    if view is not None or not isinstance(source, GpuSource):
        yield source.view(offset, nbytes) if view is None else view
        return
    for start in range(offset, offset + nbytes, STAGED_BYTES):
        async with source.staged(start, min(STAGED_BYTES, offset + nbytes - start)) as piece:
            yield piece
