"""In the place of a region server, where no node asks for images."""

from rdmacast.transport import RegionSource


class NoServer:
    """A region server that serves nobody."""

    def publish(self, name: str, source: RegionSource) -> None:
        """Nobody asks."""
