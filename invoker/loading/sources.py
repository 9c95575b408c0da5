"""The choice of the sources of a load (pure)."""

from collections.abc import Sequence

from registry.messages.images import ImageHolder


def choose_peers(
    holders: Sequence[ImageHolder], *, node: str, host: str, shares_tier: bool
) -> list[ImageHolder]:
    """Return the peers to load an image from, the nearest first: those of this host.

    This node is no source. Of a load that `shares_tier`, into host memory, peers are none which would have
    the image there: they wait for this load. Where the tier has no file of it, they have it in their arenas.
    """
    peers = {
        holder.node: holder
        for holder in holders
        if holder.node != node and not (shares_tier and holder.host == host and holder.tier == "host")
    }
    return sorted(peers.values(), key=lambda holder: holder.host != host)
