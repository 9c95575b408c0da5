"""A region server that no node reads from, and an arena without images."""

from contextlib import AbstractAsyncContextManager

from rdmacast.errors import RegionGone
from rdmacast.transport import RegionSource


class NullRegionServer:
    """A region server that ignores publications."""

    def publish(self, name: str, source: RegionSource) -> None:
        """Ignore the region."""

    async def withdraw(self, name: str, drain_s: float) -> None:
        """Ignore the withdrawal."""


class EmptyArena:
    """The images of an arena that has none."""

    def region(self, image: str) -> None:
        return None

    def reader(self, image: str) -> None:
        return None

    def buffer(self, image: str) -> memoryview | None:
        return None

    def gpu_pointer(self, image: str) -> int | None:
        return None

    def staged(self, image: str, offset: int, nbytes: int) -> AbstractAsyncContextManager[memoryview]:
        raise RegionGone(f"image {image[:12]} is not in the arena")
