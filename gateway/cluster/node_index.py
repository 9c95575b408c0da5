"""An index of the usable nodes for placement: by image, host, kind and free arena space. Pure.

The state cache updates it with each change, so that a start need not look at all nodes.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gateway.cluster.node_space import free_bytes, host_room_bytes, idle_used_at
from registry.records.engine import EngineKind
from registry.records.instance import InstanceRecord
from registry.records.node import NodeRecord

_Key = TypeVar("_Key", bound=Hashable)


class NodeKind(NamedTuple):
    """What decides whether a node can ever run a version; nodes of one kind are equal in this."""

    device: str
    allows_handlers: bool
    gpu_bytes: int
    engines: tuple[EngineKind, ...] = (EngineKind.NATIVE,)
    gpu_count: int = 1


class Emptiness(NamedTuple):
    """The place of a node in the order of starts: the fewest instances first, then the most free bytes.

    Of equals those come first of which the idle images were used longest ago: they may be evicted.
    """

    instances: int
    taken_bytes: int  # the negative of the free bytes
    idle_used_at: float
    node: str


@dataclass(frozen=True, slots=True)
class NodeSpace:
    """The space of a usable node; its instances use the images `used`."""

    kind: NodeKind
    used: frozenset[str]
    instances: int
    free_bytes: int
    idle_used_at: float
    host_room_bytes: int


class NodeIndex:
    """Usable nodes in the order in which they became usable, and the instances by node.

    `image_of` returns the image of an instance, None if it has none or its version is unknown.
    """

    def __init__(self, image_of: Callable[[InstanceRecord], str | None]) -> None:
        self.usable: dict[str, NodeRecord] = {}
        self._image_of = image_of
        self._joined = 0
        self._order: dict[str, int] = {}
        self._by_image: dict[str, dict[str, None]] = {}
        self._by_host: dict[str, dict[str, None]] = {}
        self._by_kind: dict[NodeKind, dict[str, None]] = {}
        self._instances: dict[str, dict[str, InstanceRecord]] = {}
        self._stale: set[str] = set()  # nodes of which the space has changed
        self._spaces: dict[str, NodeSpace] = {}
        self._emptiest: list[Emptiness] = []

    def __repr__(self) -> str:
        return f"<NodeIndex of {len(self.usable)} nodes, {len(self._by_image)} images>"

    # --- changes

    def put(self, record: NodeRecord) -> None:
        """Add a usable node, or replace its record."""
        old = self.usable.get(record.id)
        if old is record:
            return
        if old is None:
            self._joined += 1
            self._order[record.id] = self._joined
        self.usable[record.id] = record
        self._regroup(record.id, old, record)

    def remove(self, node: str) -> None:
        """Remove a node that is not usable now; its instances stay."""
        old = self.usable.pop(node, None)
        if old is not None:
            del self._order[node]
            self._regroup(node, old, None)

    def put_instance(self, instance: InstanceRecord) -> None:
        """Add an instance, or replace its record."""
        self._instances.setdefault(instance.node, {})[instance.instance_id] = instance
        self._stale.add(instance.node)

    def drop_instance(self, instance: InstanceRecord) -> None:
        """Remove an instance."""
        here = self._instances.get(instance.node, {})
        here.pop(instance.instance_id, None)
        if not here:
            self._instances.pop(instance.node, None)
        self._stale.add(instance.node)

    def on_images_changed(self, nodes: Iterable[str]) -> None:
        """Record that `image_of` has changed for instances on these nodes."""
        self._stale.update(nodes)

    # --- queries

    def with_image(self, image: str) -> list[NodeRecord]:
        """Return the nodes of which any tier holds the image."""
        return self.in_order(self._by_image.get(image, ()))

    def on_host(self, host: str) -> list[NodeRecord]:
        """Return the nodes of a host."""
        return self.in_order(self._by_host.get(host, ()))

    def of_each_kind(self) -> list[NodeRecord]:
        """Return one node of each kind."""
        return self.in_order(next(iter(group)) for group in self._by_kind.values())

    def sources(self, image: str) -> list[NodeRecord]:
        """Return the nodes that hold the image, and the first of all that can read the store."""
        reader = next((node for node in self.usable.values() if node.reads_store), None)
        found = self.with_image(image)
        if reader is not None and all(node.id != reader.id for node in found):
            found.append(reader)
        return found

    def instances_on(self, node: str) -> Collection[InstanceRecord]:
        """Return the instances on a node, usable or not."""
        return self._instances.get(node, {}).values()

    def used_images(self, node: str) -> frozenset[str]:
        """Return the images that instances on a node use."""
        images = (self._image_of(one) for one in self.instances_on(node))
        return frozenset(image for image in images if image is not None)

    def in_order(self, nodes: Iterable[str]) -> list[NodeRecord]:
        """Return the records of usable `nodes`, those first that became usable first."""
        return [self.usable[node] for node in sorted(nodes, key=self._order.__getitem__)]

    def space(self, node: str) -> NodeSpace:
        """Return the space of a usable node."""
        self._refresh()
        return self._spaces[node]

    def emptiest(self) -> Sequence[Emptiness]:
        """Return all usable nodes in the order of starts."""
        self._refresh()
        return self._emptiest

    def emptiness(self, node: str, reserved_bytes: int = 0) -> Emptiness:
        """Return the place of a usable node in the order of starts, with that part of its space reserved."""
        space = self.space(node)
        return Emptiness(space.instances, reserved_bytes - space.free_bytes, space.idle_used_at, node)

    # --- inside

    def _regroup(self, node: str, old: NodeRecord | None, new: NodeRecord | None) -> None:
        self._stale.add(node)
        _move(node, self._by_kind, _kinds(old), _kinds(new))
        _move(node, self._by_host, _hosts(old), _hosts(new))
        _move(node, self._by_image, _images(old), _images(new))

    def _refresh(self) -> None:
        """Compute the space of the nodes that have changed."""
        stale, self._stale = self._stale, set()
        if not stale:
            return
        order = [row for row in self._emptiest if row.node not in stale]
        for node in stale:
            self._spaces.pop(node, None)
            record = self.usable.get(node)
            if record is not None:
                space = self._spaces[node] = self._space(record)
                order.append(Emptiness(space.instances, -space.free_bytes, space.idle_used_at, node))
        order.sort()
        self._emptiest = order

    def _space(self, record: NodeRecord) -> NodeSpace:
        used = self.used_images(record.id)
        return NodeSpace(
            kind=_kind(record),
            used=used,
            instances=len(self.instances_on(record.id)),
            free_bytes=free_bytes(record, used),
            idle_used_at=idle_used_at(record, used),
            host_room_bytes=host_room_bytes(record),
        )


def _move(node: str, groups: dict[_Key, dict[str, None]], before: set[_Key], after: set[_Key]) -> None:
    """Move a node from the groups `before` to those `after`; empty groups are removed."""
    for key in before - after:
        del groups[key][node]
        if not groups[key]:
            del groups[key]
    for key in after - before:
        groups.setdefault(key, {})[node] = None


def _kind(node: NodeRecord) -> NodeKind:
    return NodeKind(node.device, node.allows_handlers, node.gpu_bytes, node.engines, node.gpu_count)


def _kinds(node: NodeRecord | None) -> set[NodeKind]:
    return set() if node is None else {_kind(node)}


def _hosts(node: NodeRecord | None) -> set[str]:
    return set() if node is None else {node.host}


def _images(node: NodeRecord | None) -> set[str]:
    return set() if node is None else {holding.image for holding in node.holdings}
