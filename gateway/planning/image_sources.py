"""The sources of each image, and the hosts of new copies. Pure.

When no node holds an image, exactly one node reads it from disk or the store, and all others pull it from
that one while it arrives.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from gateway.cluster.node_space import holds, host_room_bytes, pinned_bytes, tier_of
from registry.messages.images import ImageHolder
from registry.records.node import NodeRecord, Tier

_MAX_HOLDERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSources:
    """The `holders` from which each target gets an image.

    `loader` is the node that reads disk or store, None if a node holds the image; it need not be a target.
    `error` is the reason why no node can load it.
    """

    holders: Mapping[str, tuple[ImageHolder, ...]]
    loader: str | None = None
    error: str = ""


class ImageHolders:
    """The holders of an image: nodes with a complete copy, and those that are loading it, oldest first.

    `senders` are nodes that send K and V for what they serve.
    """

    def __init__(
        self,
        image: str,
        nodes: Iterable[NodeRecord],
        loading: Sequence[NodeRecord],
        senders: Collection[str] = (),
    ) -> None:
        self._image = image
        self._loading = loading
        # Registered host memory is preferred; the accelerator's copy is used if it is the only one.
        self._everywhere: dict[Tier, list[NodeRecord]] = {Tier.HOST: [], Tier.GPU: []}
        self._senders: dict[Tier, list[NodeRecord]] = {Tier.HOST: [], Tier.GPU: []}
        self._by_host: dict[tuple[str, Tier], list[NodeRecord]] = {}
        self._by_leaf: dict[tuple[str, Tier], list[NodeRecord]] = {}
        for node in nodes:
            tier = Tier.HOST if holds(node, image, Tier.HOST) else tier_of(node, image)
            if tier in self._everywhere:
                self._by_host.setdefault((node.host, tier), []).append(node)
                if node.id in senders:
                    self._senders[tier].append(node)
                    continue
                self._everywhere[tier].append(node)
                if node.leaf:
                    self._by_leaf.setdefault((node.leaf, tier), []).append(node)

    def __repr__(self) -> str:
        held = {tier.value: len(nodes) + len(self._senders[tier]) for tier, nodes in self._everywhere.items()}
        return f"<ImageHolders {held}, {len(self._loading)} loading>"

    def __bool__(self) -> bool:
        """Return whether there is any holder."""
        return bool(self._by_host or self._loading)

    def for_target(self, target: NodeRecord) -> tuple[ImageHolder, ...]:
        """Return the holders for `target`: its own host first, complete copies before arriving ones.

        Of each tier those under its leaf switch come first; senders come after all other complete copies.
        Equal holders are sampled differently for each target, so that the load is spread; the cost does not
        depend on the number of holders.
        """
        draw = Random(f"{self._image}\0{target.id}")
        found: dict[str, ImageHolder] = {}
        for tier in (Tier.HOST, Tier.GPU):
            self._add(self._by_host.get((target.host, tier), ()), tier, target, found, draw)
        for tier, group in self._everywhere.items():
            self._add(self._by_leaf.get((target.leaf, tier), ()), tier, target, found, draw)
            self._add(group, tier, target, found, draw)
        for tier, group in self._senders.items():
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
    image: str,
    targets: Sequence[NodeRecord],
    nodes: Sequence[NodeRecord],
    loading: Sequence[NodeRecord],
    senders: Collection[str] = (),
) -> ImageSources:
    """Choose the holders for each target; `loading` are nodes on which it is arriving, oldest first.

    `senders` are nodes that send K and V for what they serve: they are chosen last.
    """
    image_holders = ImageHolders(image, nodes, loading, senders)
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


def choose_part_sources(
    image: str, targets: Sequence[NodeRecord], nodes: Sequence[NodeRecord], loading: Sequence[NodeRecord]
) -> ImageSources:
    """Choose the holders for the members of a group.

    Where no node holds the image, each reads its own part from its disk or the store: no byte is read twice.
    """
    image_holders = ImageHolders(image, nodes, loading)
    if image_holders:
        return ImageSources(holders={target.id: image_holders.for_target(target) for target in targets})
    for target in targets:
        if choose_loader(image, [target]) is None:
            return ImageSources(
                holders={}, error=f"no node holds the image, and {target.id} cannot read the store"
            )
    return ImageSources(holders={target.id: () for target in targets})


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


def _holder(node: NodeRecord, tier: Tier) -> ImageHolder:
    return ImageHolder(node=node.id, host=node.host, cast=node.cast, tier=tier.value)


def _mix(left: str, right: str) -> bytes:
    return hashlib.blake2b(f"{left}\0{right}".encode(), digest_size=8).digest()
