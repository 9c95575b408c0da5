"""The choice of the sources of a load (pure)."""

from collections.abc import Sequence

from registry.messages.images import ImageHolder


def choose_peers(holders: Sequence[ImageHolder], *, node: str, host: str) -> list[ImageHolder]:
    """Return the peers to load an image from, the nearest first.

    This node and peers that share its host tier are no sources: their host memory is the same. A peer of this
    host with the image on its accelerator is the first.
    """
    peers = {
        holder.node: holder
        for holder in holders
        if holder.node != node and not (holder.host == host and holder.tier == "host")
    }
    return sorted(peers.values(), key=lambda holder: holder.host != host)
