"""The nodes of a delivery: those that give an image, those that take it, and those that wait for it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.cluster.node_space import holds, tier_of
from gateway.planning.serving_traffic import NO_TRAFFIC, ServingTraffic
from registry.messages.images import ImageHolder
from registry.records.node import NodeRecord, Tier

_MAX_SOURCES = 8  # or the number of targets, if that is larger


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryNodes:
    """The nodes involved in the delivery of an image.

    Any tier of `holders` has it. `arriving` nodes are loading it already, oldest first; `targets` will
    receive it, and `readers` of them read the store if no node holds it. `traffic` is that of serving.
    """

    image: str
    holders: tuple[NodeRecord, ...]
    arriving: tuple[NodeRecord, ...]
    targets: tuple[NodeRecord, ...]
    readers: frozenset[str]
    traffic: ServingTraffic = NO_TRAFFIC

    @property
    def sources(self) -> tuple[NodeRecord, ...]:
        """Nodes with a complete copy in memory, of the host or of an accelerator."""
        return tuple(
            node for node in self.holders if self.holds_host(node) or tier_of(node, self.image) is Tier.GPU
        )

    def holds_host(self, node: NodeRecord) -> bool:
        return holds(node, self.image, Tier.HOST)

    @property
    def loader(self) -> NodeRecord | None:
        """The target that reads the disk or the store if there is no source and no arriving node."""
        if self.sources or self.arriving:
            return None
        return next((node for node in self.targets if node.id in self.readers), None)


def split_targets(scene: DeliveryNodes) -> tuple[list[NodeRecord], dict[str, ImageHolder]]:
    """Return the targets that receive the image over a link, and for the others the node they wait for."""
    held = {node.host for node in scene.sources if scene.holds_host(node)}
    loader = scene.loader
    first = {node.host: node for node in reversed((*(() if loader is None else (loader,)), *scene.arriving))}
    needy, behind = [], {}
    for target in scene.targets:
        if target.host in held or tier_of(target, scene.image) is Tier.GPU:
            continue
        before = first.setdefault(target.host, target)
        if before is target:
            needy.append(target)
        elif before.id != target.id:
            behind[target.id] = ImageHolder(
                node=before.id, host=before.host, cast=before.cast, tier=Tier.HOST.value
            )
    return [node for node in needy if node is not loader], behind


def sources_of_cast(scene: DeliveryNodes, needy: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Choose the sources: one node per host with a copy, else the oldest arriving node, else the loader.

    Hosts with a target come first, then leaf switches with one, and host memory before accelerator memory;
    but nodes that send K and V come last.
    """
    if not scene.sources:
        return list(scene.arriving[:1]) or ([scene.loader] if scene.loader is not None else [])
    hosts, leaves = {node.host for node in needy}, {node.leaf for node in needy}
    best = sorted(
        scene.sources,
        key=lambda n: (
            n.id in scene.traffic.senders,
            n.host not in hosts,
            n.leaf not in leaves,
            not scene.holds_host(n),
            n.id,
        ),
    )
    one_a_host = {node.host: node for node in reversed(best)}
    chosen = [node for node in best if one_a_host[node.host] is node]
    return chosen[: max(_MAX_SOURCES, len(needy))]
