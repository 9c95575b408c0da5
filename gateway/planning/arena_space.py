"""Arena space: what instances occupy, where starts find it, and which idle ones stop when calls need it."""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge

from gateway.cluster.backoff import BackoffTable
from gateway.cluster.node_index import Emptiness, NodeKind
from gateway.cluster.node_space import arena_room, holds
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.placement import (
    StartCandidate,
    arena_image_bytes,
    can_run,
    extra_bytes,
    image_need,
    start_bytes,
    start_candidates,
)
from gateway.planning.plan import PendingStart
from gateway.planning.policy import FunctionLoad
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeNodes:
    """The ids of nodes that may start a version: all but `excluded`, of those in `only` if that is set."""

    excluded: Collection[str]
    only: Collection[str] | None = None

    def __contains__(self, node: object) -> bool:
        return node not in self.excluded and (self.only is None or node in self.only)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceRequest:
    """`count` starts of a version on `free` nodes, each with `min_bytes` of the arena besides its image.

    On `loading_hosts` the image is arriving.
    """

    version: FunctionVersion
    count: int
    free: Container[str]
    min_bytes: int = 0
    loading_hosts: Collection[str] = ()

    @property
    def need_bytes(self) -> int:
        """Return what a node that does not hold the image needs."""
        return self.min_bytes + arena_image_bytes(self.version)


class ArenaSpace:
    """The free arena space of one planning step: that of the nodes' index, less what starts have reserved.

    Of starts the nodes' records do not include yet, `pending` and on nodes that have not begun to load, each
    has reserved the most that it may take.
    """

    def __init__(
        self, state_cache: ClusterStateCache, pending: Iterable[PendingStart], backoff: BackoffTable
    ) -> None:
        self.cache = state_cache
        self.index = state_cache.index
        self.reserved: Counter[str] = Counter()
        for start in (*pending, *_beginning(state_cache)):
            version, node = state_cache.version(start.key), self.index.usable.get(start.node)
            if version is not None and node is not None:
                self.reserve(version, node, backoff.min_bytes(start.key), start.part_bytes)

    def __repr__(self) -> str:
        return f"<ArenaSpace of {self.index!r}, {self.reserved.total()} bytes reserved>"

    def candidates(self, request: SpaceRequest) -> list[StartCandidate]:
        """Return candidates of which `choose_starts` chooses as it would of all free nodes."""
        near = {node.id: node for node in self._near(request)}
        found = self._describe(request, near.values())
        missing = request.count - sum(site.fits for site in found)
        if missing > 0:
            found += self._describe(request, self._far(request, near, missing))
        return found

    def room(self, node: NodeRecord, image: str | None) -> int:
        """Return the arena space of the node for a start of the image."""
        return arena_room(node, image, self.index.space(node.id).used) - self.reserved[node.id]

    def reserve(
        self, version: FunctionVersion, node: NodeRecord, min_bytes: int = 0, part_bytes: int | None = None
    ) -> None:
        """Reserve the most that a start takes; a member of a group has `part_bytes` of the image."""
        room = self.room(node, version.image)
        self.reserved[node.id] += start_bytes(version, node, room, min_bytes, part_bytes)

    def lacks(self, request: SpaceRequest, node: NodeRecord) -> int:
        """Return how many bytes the node lacks for a start."""
        version = request.version
        return image_need(version, node) + request.min_bytes - self.room(node, version.image)

    def is_anywhere(self, request: SpaceRequest) -> bool:
        """Return whether a free node that runs the version has the space."""
        version, need = request.version, request.need_bytes
        held = {node.id: node for node in self._with_image(request)}
        if any(can_run(version, node) and self.lacks(request, node) <= 0 for node in held.values()):
            return True
        runs = _KindFilter(version)
        return any(
            -row.taken_bytes >= need
            and row.node in request.free
            and row.node not in held
            and runs[self.index.space(row.node).kind]
            for row in self._emptiest()
        )

    def _with_image(self, request: SpaceRequest) -> list[NodeRecord]:
        image = request.version.image
        held = self.index.with_image(image) if image else []
        return [node for node in held if node.id in request.free]

    def _near(self, request: SpaceRequest) -> Iterator[NodeRecord]:
        """Yield the free nodes that hold the image, and those of hosts that hold or are loading it."""
        held, image = self._with_image(request), request.version.image
        yield from held
        hosts = {node.host for node in held if image and holds(node, image, Tier.HOST)}
        for host in hosts | set(request.loading_hosts):
            yield from (node for node in self.index.on_host(host) if node.id in request.free)

    def _far(
        self, request: SpaceRequest, near: Mapping[str, NodeRecord], missing: int
    ) -> Iterator[NodeRecord]:
        """Yield other nodes in the order of starts, until `missing` hosts of each class were found.

        Classes are those of `choose_starts`: ample space or not, pinned copies to evict or not. Hosts of
        `near` nodes do not count, since they may have been chosen before.
        """
        version, need = request.version, request.need_bytes
        preferred = need - request.min_bytes + extra_bytes(version, request.min_bytes)
        runs = _KindFilter(version)
        before = {node.host for node in near.values()}
        hosts: dict[tuple[bool, bool], set[str]] = {
            (tight, crowded): set() for tight in (False, True) for crowded in (False, True)
        }
        for row in self._emptiest():
            free = -row.taken_bytes
            if (need and free < need) or row.node in near or row.node not in request.free:
                continue
            space = self.index.space(row.node)
            crowded = version.image is not None and space.host_room_bytes < version.image_bytes
            found = hosts[free < preferred, crowded]
            if len(found) >= missing or not runs[space.kind]:
                continue
            node = self.index.usable[row.node]
            if node.host not in before:
                found.add(node.host)
            yield node
            if len(hosts[False, False]) >= missing:
                return

    def _emptiest(self) -> Iterator[Emptiness]:
        """Yield all nodes in the order of starts, with what is reserved."""
        index, reserved = self.index, self.reserved
        moved = [index.emptiness(id_, nbytes) for id_, nbytes in reserved.items() if id_ in index.usable]
        rest = (row for row in index.emptiest() if row.node not in reserved)
        return merge(rest, sorted(moved))

    def _describe(self, request: SpaceRequest, nodes: Iterable[NodeRecord]) -> list[StartCandidate]:
        records = list(nodes)
        spaces = {node.id: self.index.space(node.id) for node in records}
        return start_candidates(
            request.version,
            records,
            used_images={id_: space.used for id_, space in spaces.items()},
            reserved_bytes=self.reserved,
            instances={id_: space.instances for id_, space in spaces.items()},
            loading_hosts=request.loading_hosts,
            min_bytes=request.min_bytes,
            preferred_bytes=extra_bytes(request.version, request.min_bytes),
        )


class _KindFilter(dict[NodeKind, bool]):
    """Whether nodes of a kind can run a version."""

    def __init__(self, version: FunctionVersion) -> None:
        super().__init__()
        self._version = version

    def __missing__(self, kind: NodeKind) -> bool:
        self[kind] = can_run(self._version, kind)
        return self[kind]


def _beginning(state_cache: ClusterStateCache) -> Iterator[PendingStart]:
    """Yield the starts with a record that the nodes' records do not include yet.

    A node reports an instance as loading only after its record includes the region.
    """
    for one in state_cache.instances():
        if one.state is InstanceState.STARTING:
            key = VersionKey(one.function, one.version)
            yield PendingStart(key=key, node=one.node, image=None, part_bytes=_part_bytes(one))


def _part_bytes(instance: InstanceRecord) -> int | None:
    """Return what a member of a group has of its image, None for an instance with all of it."""
    group = instance.group
    return None if group is None else group.member(instance.instance_id).image_bytes


def instance_bytes(state_cache: ClusterStateCache, instance: InstanceRecord) -> int:
    """Return the arena bytes of the instance's image, or of its part."""
    if (part := _part_bytes(instance)) is not None:
        return part
    version = state_cache.version(VersionKey(instance.function, instance.version))
    return 0 if version is None else arena_image_bytes(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedNode:
    """A node that will have the space for a start once `victims` and what is leaving have stopped."""

    node: NodeRecord
    victims: Sequence[InstanceRecord] = ()


def choose_victims(
    request: SpaceRequest,
    space: ArenaSpace,
    loads: Mapping[VersionKey, FunctionLoad],
    *,
    in_flight: Mapping[str, int],
    stopping: Collection[str],
    first: bool = False,
) -> FreedNode | None:
    """Choose instances to stop, on the node where the fewest are needed for a start to fit.

    They are idle surplus, the oldest first. For the `first` instance of a version it may be one that is busy,
    of the version with the most: functions share the nodes. There are none where the space comes anyway.
    Return None if a node has the space, or none will.
    """
    cache, key = space.cache, VersionKey(request.version.function, request.version.version)
    leaving = {one.instance_id for one in cache.instances() if is_leaving(one, stopping)}
    idle = _idle_surplus(key, cache, loads, in_flight)
    if not (idle.instances or leaving or first) or space.is_anywhere(request):
        return None
    freed = _fewest_victims(request, space, idle, leaving)
    if freed is None and first:
        freed = _fewest_victims(request, space, _largest(key, cache, loads, in_flight, leaving), leaving)
    return freed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stoppable:
    """Instances that may stop, each with its calls; of each version at most as many as `spare` has."""

    instances: Mapping[str, int]
    spare: Mapping[VersionKey, int]


def _idle_surplus(
    key: VersionKey,
    cache: ClusterStateCache,
    loads: Mapping[VersionKey, FunctionLoad],
    in_flight: Mapping[str, int],
) -> _Stoppable:
    spare = {
        other: count
        for other, load in loads.items()
        if other != key and (count := load.ready - max(load.needed, load.scaling.min_instances)) > 0
    }
    ready = (one.instance_id for other in spare for one in cache.ready(other))
    return _Stoppable(instances={name: 0 for name in ready if not in_flight.get(name)}, spare=spare)


def _largest(
    key: VersionKey,
    cache: ClusterStateCache,
    loads: Mapping[VersionKey, FunctionLoad],
    in_flight: Mapping[str, int],
    leaving: Collection[str],
) -> _Stoppable:
    """Return the instances of the other version with the most of those that have more than they must keep."""
    spare = {
        other: count
        for other, load in loads.items()
        if other != key and (count := load.ready - max(1, load.scaling.min_instances)) > 0
    }
    if not spare:
        return _Stoppable(instances={}, spare={})
    most = max(spare, key=lambda other: (loads[other].ready, other))
    ready = [one.instance_id for one in cache.ready(most) if one.instance_id not in leaving]
    return _Stoppable(instances={name: in_flight.get(name, 0) for name in ready}, spare={most: spare[most]})


def _fewest_victims(
    request: SpaceRequest, space: ArenaSpace, stoppable: _Stoppable, leaving: Collection[str]
) -> FreedNode | None:
    """Return the node with the fewest, of as many those with the fewest calls; None if no node would do.

    Nothing has to stop where instances are `leaving` that suffice.
    """
    cache, version = space.cache, request.version
    best: tuple[int, int] | None = None
    chosen: FreedNode | None = None
    found = [cache.instance(name) for name in (*stoppable.instances, *leaving)]
    names = {one.node for one in found if one is not None and one.node in space.index.usable}
    for node in space.index.in_order(names):
        if node.id not in request.free or not can_run(version, node):
            continue
        here = space.index.instances_on(node.id)
        freed = _freed_bytes(node, here, cache)
        lack = space.lacks(request, node)
        lack -= sum(freed[i.instance_id] for i in here if i.instance_id in leaving)
        if lack <= 0:
            return FreedNode(node=node)
        left, victims = Counter(stoppable.spare), []
        for instance in sorted(here, key=lambda i: i.since):
            other = VersionKey(instance.function, instance.version)
            if lack > 0 and instance.instance_id in stoppable.instances and left[other] > 0:
                left[other] -= 1
                lack -= freed[instance.instance_id]
                victims.append(instance)
        rank = len(victims), sum(stoppable.instances[one.instance_id] for one in victims)
        if lack <= 0 and (best is None or rank < best):
            best, chosen = rank, FreedNode(node=node, victims=victims)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeableBytes:
    """Arena bytes that an instance frees once `stop` has stopped; None: it is leaving anyway."""

    stop: InstanceRecord | None
    nbytes: int


def freeable(
    request: SpaceRequest,
    space: ArenaSpace,
    loads: Mapping[VersionKey, FunctionLoad],
    *,
    in_flight: Mapping[str, int],
    stopping: Collection[str],
) -> dict[str, list[FreeableBytes]]:
    """Return what instances would free on each free node: those that are leaving, then idle surplus."""
    cache, key = space.cache, VersionKey(request.version.function, request.version.version)
    idle = _idle_surplus(key, cache, loads, in_flight)
    left, going = Counter(idle.spare), dict[str, InstanceRecord | None]()
    for one in sorted(cache.instances(), key=lambda one: one.since):
        other = VersionKey(one.function, one.version)
        if is_leaving(one, stopping):
            going[one.instance_id] = None
        elif one.instance_id in idle.instances and left[other] > 0:
            left[other] -= 1
            going[one.instance_id] = one
    found: dict[str, list[FreeableBytes]] = {}
    for node in space.index.usable.values():
        here = space.index.instances_on(node.id) if node.id in request.free else ()
        freed = _freed_bytes(node, here, cache)
        for instance in here:
            # The members of a group stop with the one that takes its calls.
            leader = instance.instance_id if instance.group is None else instance.group.leader.instance_id
            name = instance.instance_id if instance.instance_id in going else leader
            if name in going:
                part = FreeableBytes(stop=going[name], nbytes=freed[instance.instance_id])
                found.setdefault(node.id, []).append(part)
    for parts in found.values():
        parts.sort(key=lambda part: part.stop is not None)
    return found


def is_leaving(instance: InstanceRecord, stopping: Collection[str]) -> bool:
    """Return whether the instance takes no new calls and stops after its current ones."""
    return instance.state is InstanceState.DRAINING or instance.instance_id in stopping


def _freed_bytes(
    node: NodeRecord, here: Collection[InstanceRecord], state_cache: ClusterStateCache
) -> dict[str, int]:
    """Return the bytes that each instance frees: its image, and its share of other arena use."""
    images = {i.instance_id: instance_bytes(state_cache, i) for i in here}
    models = sum(1 for nbytes in images.values() if nbytes)
    held = sum(h.bytes for h in node.holdings if Tier.GPU in h.tiers)
    held += sum(_part_bytes(i) or 0 for i in here)
    rest = max(0, node.gpu_bytes - node.gpu_free_bytes - held)
    return {id_: nbytes + rest // models if nbytes else 0 for id_, nbytes in images.items()}
