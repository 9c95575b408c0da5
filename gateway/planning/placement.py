"""Placement: which nodes start, which instances stop, and the sources of each image. Pure.

Starts prefer the nearest tier, then spread over hosts. When no node holds an image, exactly one node reads it
from disk or the store, and all others pull it from that one while it arrives.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from random import Random

from registry.config.emulation import mismatch
from registry.messages.node import ImageHolder
from registry.records.function import FunctionTask, FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.node import NodeRecord, Tier

_NEAREST = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 3, Tier.NONE: 4}
_LOADING_RANK = 2  # the image is arriving on this host already
_MAX_HOLDERS = 8
_KV_SHARE = 8  # the KV cache is estimated as this part of the image

_GroupKey = tuple[int, bool, bool, str]  # rank, tight, crowded, host
_HeapEntry = tuple[tuple[int, bool, bool], int, tuple[int, int, str], _GroupKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCandidate:
    """A node as a candidate for a start of one image.

    `free_bytes` includes arena space of idle images; a start takes at least `need_bytes`, and preferably
    `preferred_bytes`. `instances` counts those on the node. `rank`: 0 the accelerator holds the image, 1 its
    host, 2 its host is loading it, 3 its disk holds it, 4 none. `crowded`: the image would evict pinned
    copies from the host's memory.
    """

    id: str
    host: str
    rank: int
    free_bytes: int
    instances: int
    need_bytes: int = 0
    preferred_bytes: int = 0
    crowded: bool = False

    @property
    def fits(self) -> bool:
        return self.free_bytes >= self.need_bytes or not self.need_bytes

    @property
    def tight(self) -> bool:
        return self.free_bytes < self.preferred_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSources:
    """The `holders` from which each target gets an image.

    `loader` is the node that reads disk or store, None if a node holds the image; it need not be a target.
    `error` is the reason why no node can load it.
    """

    holders: Mapping[str, tuple[ImageHolder, ...]]
    loader: str | None = None
    error: str = ""


def tier_of(node: NodeRecord, image: str) -> Tier:
    """Return the nearest tier of the node that holds the complete image."""
    held = [tier for holding in node.holdings if holding.image == image for tier in holding.tiers]
    return min(held, key=lambda tier: _NEAREST[tier], default=Tier.NONE)


def free_bytes(node: NodeRecord, used_images: Collection[str]) -> int:
    """Return the arena space for a start: free bytes and images that no instance uses."""
    idle = sum(h.bytes for h in node.holdings if Tier.GPU in h.tiers and h.image not in used_images)
    return min(node.gpu_bytes, node.gpu_free_bytes + idle) if node.gpu_bytes else node.gpu_free_bytes


def arena_room(node: NodeRecord, image: str | None, used_images: Collection[str]) -> int:
    """Return the arena space for a start of `image`, without its own region, which the start shares."""
    return free_bytes(node, {*used_images, image} if image else used_images)


def host_room_bytes(node: NodeRecord) -> int:
    """Return the host memory for an image: free bytes and copies that are not pinned."""
    idle = sum(h.bytes for h in node.holdings if Tier.HOST in h.tiers and not h.pinned)
    return min(node.host_bytes, node.host_free_bytes + idle)


def pinned_bytes(node: NodeRecord) -> int:
    """Return the host memory of the pinned copies on the node's host."""
    return sum(h.bytes for h in node.holdings if h.pinned)


def start_candidates(
    version: FunctionVersion,
    nodes: Sequence[NodeRecord],
    *,
    used_images: Mapping[str, Collection[str]],
    reserved_bytes: Mapping[str, int],
    instances: Mapping[str, int],
    loading_hosts: Collection[str],
    min_bytes: int = 0,
    preferred_bytes: int = 0,
) -> list[StartCandidate]:
    """Describe `nodes` as candidates for `version`; `reserved_bytes` belong to starts in progress.

    Besides its image an instance takes at least `min_bytes` of the arena, preferably `preferred_bytes`.
    """
    image = version.image
    host_holders = {n.host for n in nodes if image and _holds(n, image, Tier.HOST)}
    found = []
    for node in nodes:
        barred = version.runs_user_code and not node.allows_handlers
        if barred or (image is not None and mismatch(version.architecture, node.device)):
            continue
        rank = _NEAREST[tier_of(node, image)] if image else 0
        if node.host in host_holders or node.host in loading_hosts:
            rank = min(rank, _NEAREST[Tier.HOST] if node.host in host_holders else _LOADING_RANK)
        room = arena_room(node, image, used_images.get(node.id, ())) - reserved_bytes.get(node.id, 0)
        found.append(
            StartCandidate(
                id=node.id,
                host=node.host,
                rank=rank,
                free_bytes=room,
                instances=instances.get(node.id, 0),
                need_bytes=image_need(version, node) + min_bytes,
                preferred_bytes=image_need(version, node) + max(min_bytes, preferred_bytes),
                crowded=rank > _NEAREST[Tier.HOST] and host_room_bytes(node) < version.image_bytes,
            )
        )
    return found


def image_need(version: FunctionVersion, node: NodeRecord) -> int:
    """Return the additional arena bytes of the image: 0 where the accelerator holds it already."""
    if version.image is None or tier_of(node, version.image) is Tier.GPU:
        return 0
    return version.image_bytes


def extra_bytes(version: FunctionVersion, min_bytes: int) -> int:
    """Return the arena bytes to reserve besides the image: an estimate, or what failed starts showed.

    Only the node knows how large a KV cache must be at least; a start without enough space reports it.
    """
    generates = version.image is not None and version.task is FunctionTask.GENERATE
    return max(version.image_bytes // _KV_SHARE if generates else 0, min_bytes)


def choose_starts(count: int, candidates: Iterable[StartCandidate]) -> list[StartCandidate]:
    """Choose up to `count` candidates.

    The order is: nearest tier, ample arena space, no eviction of pinned copies, the host with the fewest
    chosen, the emptiest node.
    """
    groups: dict[_GroupKey, list[StartCandidate]] = {}
    for site in candidates:
        if site.fits:
            groups.setdefault((site.rank, site.tight, site.crowded, site.host), []).append(site)
    for members in groups.values():
        members.sort(key=_emptiness, reverse=True)
    chosen: list[StartCandidate] = []
    on_host: Counter[str] = Counter()
    # The best of each group; its count of the host's starts may be outdated, and is then too low.
    heap = [_heap_entry(group, members[-1], 0) for group, members in groups.items()]
    heapify(heap)
    while heap and len(chosen) < count:
        _, started, _, group = heap[0]
        host = group[-1]
        if started == on_host[host]:
            chosen.append(groups[group].pop())
            on_host[host] += 1
        if groups[group]:
            heapreplace(heap, _heap_entry(group, groups[group][-1], on_host[host]))
        else:
            heappop(heap)
    return chosen


def _heap_entry(group: _GroupKey, site: StartCandidate, on_host: int) -> _HeapEntry:
    return group[:3], on_host, _emptiness(site), group


def _emptiness(site: StartCandidate) -> tuple[int, int, str]:
    return site.instances, -site.free_bytes, site.id


def choose_stops(
    count: int,
    ready: Iterable[InstanceRecord],
    coming: Iterable[InstanceRecord],
    *,
    in_flight: Mapping[str, int],
    keep_on: Collection[str] = (),
) -> list[InstanceRecord]:
    """Choose `count` instances to stop.

    The order is: not on `keep_on`, idle before busy, starting before ready, the youngest first. A busy one
    finishes its calls.
    """
    rows = [
        ((i.node in keep_on, in_flight.get(i.instance_id, 0), order, -i.since, i.instance_id), i)
        for order, group in enumerate((coming, ready))
        for i in group
    ]
    return [instance for _, instance in sorted(rows, key=lambda row: row[0])[:count]]


class ImageHolders:
    """The holders of an image: nodes with a complete copy, and those that are loading it, oldest first."""

    def __init__(self, image: str, nodes: Iterable[NodeRecord], loading: Sequence[NodeRecord]) -> None:
        self._image = image
        self._loading = loading
        # Registered host memory is preferred; the accelerator's copy is used if it is the only one.
        self._everywhere: dict[Tier, list[NodeRecord]] = {Tier.HOST: [], Tier.GPU: []}
        self._by_host: dict[tuple[str, Tier], list[NodeRecord]] = {}
        for node in nodes:
            tier = Tier.HOST if _holds(node, image, Tier.HOST) else tier_of(node, image)
            if tier in self._everywhere:
                self._everywhere[tier].append(node)
                self._by_host.setdefault((node.host, tier), []).append(node)

    def __repr__(self) -> str:
        held = {tier.value: len(nodes) for tier, nodes in self._everywhere.items()}
        return f"<ImageHolders {held}, {len(self._loading)} loading>"

    def __bool__(self) -> bool:
        """Return whether there is any holder."""
        return bool(self._by_host or self._loading)

    def for_target(self, target: NodeRecord) -> tuple[ImageHolder, ...]:
        """Return the holders for `target`: its own host first, complete copies before arriving ones.

        Equal holders are sampled differently for each target, so that the load is spread; the cost does not
        depend on the number of holders.
        """
        draw = Random(f"{self._image}\0{target.id}")
        found: dict[str, ImageHolder] = {}
        for tier in (Tier.HOST, Tier.GPU):
            self._add(self._by_host.get((target.host, tier), ()), tier, target, found, draw)
        for tier, group in self._everywhere.items():
            self._add(group, tier, target, found, draw)
        for node in self._loading:
            if len(found) >= _MAX_HOLDERS:
                break
            if node.id != target.id:
                found.setdefault(node.id, _holder(node, Tier.HOST))
        return tuple(found.values())

    def _add(
        self,
        group: Sequence[NodeRecord],
        tier: Tier,
        target: NodeRecord,
        found: dict[str, ImageHolder],
        draw: Random,
    ) -> None:
        # Enough to fill the list even if some are listed already, or are the target itself.
        for node in draw.sample(group, min(len(group), _MAX_HOLDERS + len(found) + 1)):
            if len(found) < _MAX_HOLDERS and node.id != target.id:
                found.setdefault(node.id, _holder(node, tier))


def choose_sources(
    image: str, targets: Sequence[NodeRecord], nodes: Sequence[NodeRecord], loading: Sequence[NodeRecord]
) -> ImageSources:
    """Choose the holders for each target; `loading` are nodes on which it is arriving, oldest first."""
    image_holders = ImageHolders(image, nodes, loading)
    if image_holders:
        return ImageSources(holders={target.id: image_holders.for_target(target) for target in targets})
    loader = choose_loader(image, targets) or choose_loader(image, nodes)
    if loader is None:
        return ImageSources(holders={}, error="no node holds the image and none can read the store")
    arriving = _holder(loader, Tier.HOST)
    return ImageSources(
        holders={target.id: () if target.id == loader.id else (arriving,) for target in targets},
        loader=loader.id,
    )


def choose_loader(image: str, nodes: Sequence[NodeRecord]) -> NodeRecord | None:
    """Return the node that reads the image from its disk, else the first that can read the store."""
    on_disk = [node for node in nodes if tier_of(node, image) is Tier.DISK]
    readers = [node for node in nodes if node.reads_store]
    return next(iter(on_disk + readers), None)


def choose_warm(image: str, nbytes: int, count: int, nodes: Iterable[NodeRecord]) -> list[NodeRecord]:
    """Choose up to `count` nodes for new host copies, at most one per host.

    The order is: enough space, the fewest pinned bytes, the fewest bytes. All gateways with the same nodes
    choose the same ones.
    """
    able = [node for node in nodes if node.host_bytes >= nbytes]
    able.sort(
        key=lambda n: (
            host_room_bytes(n) < nbytes,
            pinned_bytes(n),
            n.host_free_bytes < nbytes,
            sum(h.bytes for h in n.holdings if Tier.HOST in h.tiers),
            not n.reads_store,
            _mix(image, n.id),
        )
    )
    first_of_host: dict[str, NodeRecord] = {}
    for node in able:
        first_of_host.setdefault(node.host, node)
    return list(first_of_host.values())[: max(0, count)]


def unschedulable_reason(version: FunctionVersion, nodes: Sequence[NodeRecord]) -> str:
    """Return why no node can ever start the version, "" if one can (or if there are no nodes)."""
    if not nodes:
        return ""
    able = nodes
    if version.runs_user_code:
        able = [node for node in nodes if node.allows_handlers]
        if not able:
            return "handlers are not allowed on any node (start an invoker with --allow-handlers)"
    if version.image is not None:
        reasons = {node.id: mismatch(version.architecture, node.device) for node in able}
        able = [node for node in able if not reasons[node.id]]
        if not able:
            return f"no node can run it: {next(iter(reasons.values()))}"
    largest = max(node.gpu_bytes for node in able)
    if version.image is not None and largest and version.image_bytes > largest:
        return f"the image has {version.image_bytes} bytes, the largest accelerator arena only {largest}"
    return ""


def too_small(node: NodeRecord, version: FunctionVersion, min_bytes: int) -> bool:
    """Return whether even the node's empty arena is too small for the image and `min_bytes`."""
    return bool(node.gpu_bytes) and version.image_bytes + min_bytes > node.gpu_bytes


def _holds(node: NodeRecord, image: str, tier: Tier) -> bool:
    return any(holding.image == image and tier in holding.tiers for holding in node.holdings)


def _holder(node: NodeRecord, tier: Tier) -> ImageHolder:
    return ImageHolder(node=node.id, host=node.host, cast=node.cast, tier=tier.value)


def _mix(left: str, right: str) -> bytes:
    return hashlib.blake2b(f"{left}\0{right}".encode(), digest_size=8).digest()
