"""Which nodes start, which instances stop, and who gives the bytes to whom: pure decisions.

Starts go to the nearest tier first, then spread over hosts. When nobody holds an image, exactly one
node reads it from disk or the store, and every other takes it from that one while it arrives.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from random import Random

from registry.emulation import mismatch
from registry.function import FunctionVersion
from registry.instance import InstanceRecord
from registry.messages import Holder
from registry.node import NodeRecord, Tier

_NEAREST = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 3, Tier.NONE: 4}
_LOADING_RANK = 2  # the image is arriving on this host already
_MAX_HOLDERS = 8

_Likeness = tuple[int, bool, bool, str]  # rank, tight, crowded, host
_Offer = tuple[tuple[int, bool, bool], int, tuple[int, int, str], _Likeness]


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
        if version.image is not None and mismatch(version.architecture, node.device):
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
    alike: dict[_Likeness, list[Site]] = {}
    for site in candidates:
        if site.fits:
            alike.setdefault((site.rank, site.tight, site.crowded, site.host), []).append(site)
    for sites_alike in alike.values():
        sites_alike.sort(key=_emptiness, reverse=True)
    chosen: list[Site] = []
    on_host: Counter[str] = Counter()
    # The best of each group; what it says of the host's starts may be out of date, and is then too good.
    heap = [_offer(likeness, sites_alike[-1], 0) for likeness, sites_alike in alike.items()]
    heapify(heap)
    while heap and len(chosen) < count:
        _, started, _, likeness = heap[0]
        host = likeness[-1]
        if started == on_host[host]:
            chosen.append(alike[likeness].pop())
            on_host[host] += 1
        if alike[likeness]:
            heapreplace(heap, _offer(likeness, alike[likeness][-1], on_host[host]))
        else:
            heappop(heap)
    return chosen


def _offer(likeness: _Likeness, site: Site, on_host: int) -> _Offer:
    return likeness[:3], on_host, _emptiness(site), likeness


def _emptiness(site: Site) -> tuple[int, int, str]:
    return site.instances, -site.free_bytes, site.id


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


class Givers:
    """Who can give an image: nodes that hold it complete, and those to which it is coming, oldest first."""

    def __init__(self, image: str, nodes: Iterable[NodeRecord], loading: Sequence[NodeRecord]) -> None:
        self._image = image
        self._loading = loading
        # A reader prefers registered host memory; the accelerator's copy serves where it is the only one.
        self._everywhere: dict[Tier, list[NodeRecord]] = {Tier.HOST: [], Tier.GPU: []}
        self._by_host: dict[tuple[str, Tier], list[NodeRecord]] = {}
        for node in nodes:
            tier = Tier.HOST if _holds(node, image, Tier.HOST) else tier_of(node, image)
            if tier in self._everywhere:
                self._everywhere[tier].append(node)
                self._by_host.setdefault((node.host, tier), []).append(node)

    def __repr__(self) -> str:
        held = {tier.value: len(nodes) for tier, nodes in self._everywhere.items()}
        return f"<Givers {held}, {len(self._loading)} loading>"

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._by_host or self._loading)

    def for_(self, target: NodeRecord) -> tuple[Holder, ...]:
        """Whom `target` is to ask: its own host first, complete copies before arriving ones.

        Of equals it is others for each target, so that many do not all ask one source; as many are
        looked at as are named, however many there are.
        """
        draw = Random(f"{self._image}\0{target.id}")
        found: dict[str, Holder] = {}
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
        found: dict[str, Holder],
        draw: Random,
    ) -> None:
        # Enough to fill the list though some of them are in it, or are the target itself.
        for node in draw.sample(group, min(len(group), _MAX_HOLDERS + len(found) + 1)):
            if len(found) < _MAX_HOLDERS and node.id != target.id:
                found.setdefault(node.id, _holder(node, tier))


def choose_sources(
    image: str, targets: Sequence[NodeRecord], nodes: Sequence[NodeRecord], loading: Sequence[NodeRecord]
) -> Sources:
    """Decide who gives `image` to each target; `loading` are nodes on which it is arriving, oldest first."""
    givers = Givers(image, nodes, loading)
    if givers:
        return Sources(holders={target.id: givers.for_(target) for target in targets})
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
    first_of_host: dict[str, NodeRecord] = {}
    for node in able:
        first_of_host.setdefault(node.host, node)
    return list(first_of_host.values())[: max(0, count)]


def impossible(version: FunctionVersion, nodes: Sequence[NodeRecord]) -> str:
    """Why no node could ever start the version, "" if one could (or if there are none to ask)."""
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


def too_small(node: NodeRecord, version: FunctionVersion, least_bytes: int) -> bool:
    """Whether even the node's empty arena cannot take the image and `least_bytes`."""
    return bool(node.gpu_bytes) and version.image_bytes + least_bytes > node.gpu_bytes


def _holds(node: NodeRecord, image: str, tier: Tier) -> bool:
    return any(holding.image == image and tier in holding.tiers for holding in node.holdings)


def _holder(node: NodeRecord, tier: Tier) -> Holder:
    return Holder(node=node.id, host=node.host, cast=node.cast, tier=tier.value)


def _mix(left: str, right: str) -> bytes:
    return hashlib.blake2b(f"{left}\0{right}".encode(), digest_size=8).digest()
