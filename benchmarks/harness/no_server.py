"""A region server that no node reads from."""

from rdmacast.transport import RegionSource


class NullRegionServer:
    """A region server that ignores publications."""

    def publish(self, name: str, source: RegionSource) -> None:
        """Ignore the region."""

    async def withdraw(self, name: str, drain_s: float) -> None:
        """Ignore the withdrawal."""
