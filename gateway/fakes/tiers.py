"""Changes of the images in a fake node's record. Pure."""

from dataclasses import replace

from registry.records.node import CachedImage, NodeRecord, Tier


def with_image(record: NodeRecord, image: str, tier: Tier, nbytes: int) -> NodeRecord:
    """Return the record with the image in `tier`; the same object if it is there already."""
    held = {holding.image: holding for holding in record.holdings}
    known = held.get(image)
    if known is not None and tier in known.tiers:
        return record
    tiers = (known.tiers if known else ()) + (tier,)
    pinned = known is not None and known.pinned
    held[image] = CachedImage(image=image, tiers=tiers, bytes=nbytes, last_used_at=1e12, pinned=pinned)
    free = record.gpu_free_bytes - (nbytes if tier is Tier.GPU else 0)
    return replace(record, holdings=tuple(held.values()), gpu_free_bytes=free)


def with_mark(record: NodeRecord, image: str, *, pinned: bool) -> NodeRecord:
    held = (replace(h, pinned=pinned) if h.image == image else h for h in record.holdings)
    return replace(record, holdings=tuple(held))


def without_image(record: NodeRecord, image: str, tier: Tier) -> NodeRecord:
    freed = sum(h.bytes for h in record.holdings if h.image == image and tier is Tier.GPU in h.tiers)
    holdings = []
    for holding in record.holdings:
        if holding.image == image:
            tiers = tuple(t for t in holding.tiers if t is not tier)
            holding = replace(holding, tiers=tiers, pinned=holding.pinned and tier is not Tier.HOST)
        if holding.tiers:
            holdings.append(holding)
    return replace(record, holdings=tuple(holdings), gpu_free_bytes=record.gpu_free_bytes + freed)
