"""Which nodes start, which instances stop, and who gives the bytes to whom: pure decisions.

Starts go to the nearest tier first, then spread over hosts. When nobody holds an image, exactly one
node reads it from disk or the store, and every other takes it from that one while it arrives.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from registry.function import FunctionVersion
from registry.instance import InstanceRecord
from registry.messages import Holder
from registry.node import NodeRecord, Tier

_NEAREST = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 3, Tier.NONE: 4}
_LOADING_RANK = 2  # the image is arriving on this host already
_MAX_HOLDERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A node as a place for one image. `free_bytes` counts arena space that idle images would give up,
    of which a start there takes at least `need_bytes`, and without squeezing `wish_bytes`;
    `instances` are those that are there now. `rank`: 0 the accelerator holds the image, 1 its host,
    2 its host is loading it, 3 its disk holds it, 4 nothing. `crowded`: the image would push kept
    copies out of the host's memory."""

    id: str
    host: str
    rank: int
    free_bytes: int
    instances: int
    need_bytes: int = 0
    wish_bytes: int = 0
    crowded: bool = False

    @property
    def fits(self) -> bool:
        return self.free_bytes >= self.need_bytes or not self.need_bytes

    @property
    def tight(self) -> bool:
        return self.free_bytes < self.wish_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where each target gets the image: `holders` by node. `loader` is the one that reads disk or store,
    None if somebody holds it; it need not be a target. `error` says why nobody can load it."""

    holders: Mapping[str, tuple[Holder, ...]]
    loader: str | None = None
    error: str = ""


def tier_of(node: NodeRecord, image: str) -> Tier:
    """The nearest tier of the node that holds the complete image."""
    held = [tier for holding in node.holdings if holding.image == image for tier in holding.tiers]
    return min(held, key=lambda tier: _NEAREST[tier], default=Tier.NONE)


def free_bytes(node: NodeRecord, used_images: Collection[str]) -> int:
    """Arena space that a start may take: what is free, and images that no instance uses."""
    idle = sum(h.bytes for h in node.holdings if Tier.GPU in h.tiers and h.image not in used_images)
    return min(node.gpu_bytes, node.gpu_free_bytes + idle) if node.gpu_bytes else node.gpu_free_bytes


def arena_room(node: NodeRecord, image: str | None, used_images: Collection[str]) -> int:
    """Arena space for what a start of `image` takes anew: the image's own region is not given up for it."""
    return free_bytes(node, {*used_images, image} if image else used_images)


def host_room_bytes(node: NodeRecord) -> int:
    """Host memory that an image may take: what is free, and copies that need not be kept."""
    idle = sum(h.bytes for h in node.holdings if Tier.HOST in h.tiers and not h.kept)
    return min(node.host_bytes, node.host_free_bytes + idle)


def kept_bytes(node: NodeRecord) -> int:
    """Host memory of the copies that the node's host keeps for the cluster."""
    return sum(h.bytes for h in node.holdings if h.kept)


def sites(
    version: FunctionVersion,
    nodes: Sequence[NodeRecord],
    *,
    used_images: Mapping[str, Collection[str]],
    reserved_bytes: Mapping[str, int],
    instances: Mapping[str, int],
    loading_hosts: Collection[str],
    least_bytes: int = 0,
    wish_bytes: int = 0,
) -> list[Site]:
    """Describe `nodes` as places for `version`; `reserved_bytes` are promised to starts under way.
    Besides its image an instance takes at least `least_bytes` of the arena, and may want `wish_bytes`."""
    image = version.image
    host_holders = {n.host for n in nodes if image and _holds(n, image, Tier.HOST)}
    found = []
    for node in nodes:
        if version.runs_user_code and not node.allows_handlers:
            continue
        rank = _NEAREST[tier_of(node, image)] if image else 0
        if rank > _NEAREST[Tier.HOST] and node.host in host_holders:
            rank = _NEAREST[Tier.HOST]
        if rank > _LOADING_RANK and node.host in loading_hosts:
            rank = _LOADING_RANK
        found.append(
            Site(
                id=node.id,
                host=node.host,
                rank=rank,
                free_bytes=arena_room(node, image, used_images.get(node.id, ()))
                - reserved_bytes.get(node.id, 0),
                instances=instances.get(node.id, 0),
                need_bytes=image_need(version, node) + least_bytes,
                wish_bytes=image_need(version, node) + max(least_bytes, wish_bytes),
                crowded=rank > _NEAREST[Tier.HOST] and host_room_bytes(node) < version.image_bytes,
            )
        )
    return found


def image_need(version: FunctionVersion, node: NodeRecord) -> int:
    """Arena bytes that the image takes anew: where the accelerator holds it, its region is shared."""
    if version.image is None or tier_of(node, version.image) is Tier.GPU:
        return 0
    return version.image_bytes


def choose_starts(count: int, candidates: Iterable[Site]) -> list[Site]:
    """Up to `count` places: nearest tier first, then where the arena has ample room, then where no kept
    copy must go, then the host with fewest of these, then the emptiest."""
    left = [site for site in candidates if site.fits]
    chosen: list[Site] = []
    on_host: Counter[str] = Counter()
    while left and len(chosen) < count:
        best = min(left, key=lambda s: _preference(s, on_host[s.host]))
        left.remove(best)
        chosen.append(best)
        on_host[best.host] += 1
    return chosen


def _preference(site: Site, on_host: int) -> tuple[object, ...]:
    return (site.rank, site.tight, site.crowded, on_host, site.instances, -site.free_bytes, site.id)


def choose_stops(
    count: int,
    ready: Iterable[InstanceRecord],
    coming: Iterable[InstanceRecord],
    *,
    in_flight: Mapping[str, int],
    keep_on: Collection[str] = (),
) -> list[InstanceRecord]:
    """`count` instances to stop: away from `keep_on` first, idle before busy, starting before ready,
    the youngest first. A busy one finishes what it has."""
    rows = [
        ((i.node in keep_on, in_flight.get(i.instance_id, 0), order, -i.since, i.instance_id), i)
        for order, group in enumerate((coming, ready))
        for i in group
    ]
    return [instance for _, instance in sorted(rows, key=lambda row: row[0])[:count]]


def holder_list(
    target: NodeRecord, image: str, nodes: Iterable[NodeRecord], loading: Sequence[NodeRecord]
) -> tuple[Holder, ...]:
    """Who can give `image` to `target`: its own host first, complete copies before arriving ones.

    Equals are ordered by a hash of the pair, so that many targets do not all ask one source.
    """
    rows = []
    for node in nodes:
        tier = tier_of(node, image)
        if node.id != target.id and tier in (Tier.GPU, Tier.HOST):
            # A reader prefers registered host memory; the accelerator's copy serves where it is the only one.
            tier = Tier.HOST if _holds(node, image, Tier.HOST) else tier
            rows.append(((node.host != target.host, tier is Tier.GPU, _mix(node.id, target.id)), node, tier))
    rows.sort(key=lambda row: row[0])
    holders = [_holder(node, tier) for _, node, tier in rows]
    known = {holder.node for holder in holders}
    holders += [_holder(n, Tier.HOST) for n in loading if n.id != target.id and n.id not in known]
    return tuple(holders[:_MAX_HOLDERS])


def choose_sources(
    image: str, targets: Sequence[NodeRecord], nodes: Sequence[NodeRecord], loading: Sequence[NodeRecord]
) -> Sources:
    """Decide who gives `image` to each target; `loading` are nodes on which it is arriving, oldest first."""
    holders = {target.id: holder_list(target, image, nodes, loading) for target in targets}
    held = any(tier_of(n, image) in (Tier.GPU, Tier.HOST) for n in nodes)
    if held or loading:
        return Sources(holders=holders)
    loader = choose_loader(image, targets) or choose_loader(image, nodes)
    if loader is None:
        return Sources(holders={}, error="no node holds the image and none can read the store")
    arriving = _holder(loader, Tier.HOST)
    return Sources(
        holders={target.id: () if target.id == loader.id else (arriving,) for target in targets},
        loader=loader.id,
    )


def choose_loader(image: str, nodes: Sequence[NodeRecord]) -> NodeRecord | None:
    """The node that reads the image from its disk, else the first that can read the store."""
    on_disk = [node for node in nodes if tier_of(node, image) is Tier.DISK]
    readers = [node for node in nodes if node.reads_store]
    return next(iter(on_disk + readers), None)


def choose_warm(image: str, nbytes: int, count: int, nodes: Iterable[NodeRecord]) -> list[NodeRecord]:
    """Up to `count` nodes for new host copies, at most one a host: room first, then the fewest bytes that
    are kept there, then the fewest at all.

    Every gateway that sees the same nodes chooses the same ones.
    """
    able = [node for node in nodes if node.host_bytes >= nbytes]
    able.sort(
        key=lambda n: (
            host_room_bytes(n) < nbytes,
            kept_bytes(n),
            n.host_free_bytes < nbytes,
            sum(h.bytes for h in n.holdings if Tier.HOST in h.tiers),
            not n.reads_store,
            _mix(image, n.id),
        )
    )
    chosen: list[NodeRecord] = []
    for node in able:
        if len(chosen) < count and all(node.host != other.host for other in chosen):
            chosen.append(node)
    return chosen


def impossible(version: FunctionVersion, nodes: Sequence[NodeRecord]) -> str:
    """Why no node could ever start the version, "" if one could (or if there are none to ask)."""
    if not nodes:
        return ""
    able = nodes
    if version.runs_user_code:
        able = [node for node in nodes if node.allows_handlers]
        if not able:
            return "handlers are not allowed on any node (start an invoker with --allow-handlers)"
    largest = max(node.gpu_bytes for node in able)
    if version.image is not None and largest and version.image_bytes > largest:
        return f"the image has {version.image_bytes} bytes, the largest accelerator arena only {largest}"
    return ""


def too_small(node: NodeRecord, version: FunctionVersion, least_bytes: int) -> bool:
    """Whether even the node's empty arena cannot take the image and `least_bytes`."""
    return bool(node.gpu_bytes) and version.image_bytes + least_bytes > node.gpu_bytes


def _holds(node: NodeRecord, image: str, tier: Tier) -> bool:
    return any(holding.image == image and tier in holding.tiers for holding in node.holdings)


def _holder(node: NodeRecord, tier: Tier) -> Holder:
    return Holder(node=node.id, host=node.host, cast=node.cast, tier=tier.value)


def _mix(left: str, right: str) -> bytes:
    return hashlib.blake2b(f"{left}\0{right}".encode(), digest_size=8).digest()
