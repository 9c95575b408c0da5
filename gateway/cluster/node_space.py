"""What a node holds, and the space that it has for more. Pure functions of its record."""

from collections.abc import Collection

from registry.records.node import NodeRecord, Tier

NEAREST = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 3, Tier.NONE: 4}  # 2: the image is arriving on the host


def tier_of(node: NodeRecord, image: str) -> Tier:
    """Return the nearest tier of the node that holds the complete image."""
    held = [tier for holding in node.holdings if holding.image == image for tier in holding.tiers]
    return min(held, key=lambda tier: NEAREST[tier], default=Tier.NONE)


def holds(node: NodeRecord, image: str, tier: Tier) -> bool:
    """Return whether that tier of the node holds the complete image."""
    return any(holding.image == image and tier in holding.tiers for holding in node.holdings)


def free_bytes(node: NodeRecord, used_images: Collection[str], image: str | None = None) -> int:
    """Return the arena space for a start of `image`: the largest range without what is in use.

    Images that no instance uses are evicted if necessary, but not the one that the start shares.
    """
    idle = {h.image: h.bytes for h in node.holdings if Tier.GPU in h.tiers and h.image not in used_images}
    shared = idle.pop(image, 0) if image else 0
    free, largest = node.gpu_free_bytes + sum(idle.values()), node.gpu_largest_room_bytes
    if largest is not None:
        # The shared image divides the largest range, or lies in another.
        free = min(free, max(node.gpu_largest_free_bytes or 0, largest - shared))
    return min(node.gpu_bytes, free) if node.gpu_bytes else free


def idle_used_at(node: NodeRecord, used_images: Collection[str]) -> float:
    """Return when the node's accelerator last used an image that no instance uses now; 0.0 without one."""
    idle = (h for h in node.holdings if Tier.GPU in h.tiers and h.image not in used_images)
    return max((h.last_used_at for h in idle), default=0.0)


def arena_room(node: NodeRecord, image: str | None, used_images: Collection[str]) -> int:
    """Return the arena space for a start of `image`, without its own region, which the start shares."""
    return free_bytes(node, used_images, image)


def host_room_bytes(node: NodeRecord) -> int:
    """Return the host memory for an image: free bytes and copies that are not pinned."""
    idle = sum(h.bytes for h in node.holdings if Tier.HOST in h.tiers and not h.pinned)
    return min(node.host_bytes, node.host_free_bytes + idle)


def pinned_bytes(node: NodeRecord) -> int:
    """Return the host memory of the pinned copies on the node's host."""
    return sum(h.bytes for h in node.holdings if h.pinned)
