"""Arena space: what instances occupy, and which idle ones are stopped when queued calls need it."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from gateway.cluster.backoff import BackoffTable
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.placement import arena_room, extra_bytes, image_need
from gateway.planning.plan import PendingStart
from gateway.planning.policy import FunctionLoad
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord, Tier


def used_images(state_cache: ClusterStateCache) -> dict[str, set[str]]:
    """Return the images that instances use, by node."""
    used: dict[str, set[str]] = {}
    for instance in state_cache.instances():
        version = state_cache.version(VersionKey(instance.function, instance.version))
        if version is not None and version.image is not None:
            used.setdefault(instance.node, set()).add(version.image)
    return used


def reserved_bytes(
    state_cache: ClusterStateCache, pending: Iterable[PendingStart], backoff: BackoffTable
) -> dict[str, int]:
    """Return the arena bytes by node of starts that the nodes' records do not include yet.

    A node reports an instance as loading only after its record includes the region.
    """
    coming = [(p.key, p.node) for p in pending]
    coming += [
        (VersionKey(i.function, i.version), i.node)
        for i in state_cache.instances()
        if i.state is InstanceState.STARTING
    ]
    reserved: Counter[str] = Counter()
    for key, node in coming:
        version, entry = state_cache.version(key), state_cache.node(node)
        if version is not None and entry is not None:
            extra = extra_bytes(version, backoff.min_bytes(key))
            reserved[node] += image_need(version, entry.record) + extra
    return reserved


def instance_bytes(state_cache: ClusterStateCache, instance: InstanceRecord) -> int:
    """Return the arena bytes of the instance's image."""
    version = state_cache.version(VersionKey(instance.function, instance.version))
    return version.image_bytes if version is not None and version.image is not None else 0


def choose_victims(
    version: FunctionVersion,
    nodes: Iterable[NodeRecord],
    state_cache: ClusterStateCache,
    loads: Mapping[VersionKey, FunctionLoad],
    *,
    in_flight: Mapping[str, int],
    reserved_bytes: Mapping[str, int],
    stopping: Collection[str],
    min_bytes: int = 0,
) -> list[InstanceRecord]:
    """Choose idle surplus instances to stop, on the node where the fewest are needed for `version` to fit.

    The oldest are chosen first; none if a node will have the space anyway.
    """
    key = VersionKey(version.function, version.version)
    used = used_images(state_cache)
    spare = {
        other: load.ready - max(load.needed, load.scaling.min_instances) for other, load in loads.items()
    }
    best: list[InstanceRecord] | None = None
    for node in nodes:
        here = [i for i in state_cache.instances() if i.node == node.id]
        freed = _freed_bytes(node, here, state_cache)
        lack = image_need(version, node) + min_bytes + reserved_bytes.get(node.id, 0)
        lack -= arena_room(node, version.image, used.get(node.id, ()))
        lack -= sum(freed[i.instance_id] for i in here if is_leaving(i, stopping))
        if lack <= 0:
            return []
        left, victims = Counter(spare), []
        for instance in sorted(here, key=lambda i: i.since):
            other = VersionKey(instance.function, instance.version)
            idle = instance in state_cache.ready(other) and not in_flight.get(instance.instance_id)
            if lack > 0 and idle and other != key and left[other] > 0:
                left[other] -= 1
                lack -= freed[instance.instance_id]
                victims.append(instance)
        if lack <= 0 and (best is None or len(victims) < len(best)):
            best = victims
    return best or []


def is_leaving(instance: InstanceRecord, stopping: Collection[str]) -> bool:
    """Return whether the instance takes no new calls and stops after its current ones."""
    return instance.state is InstanceState.DRAINING or instance.instance_id in stopping


def _freed_bytes(
    node: NodeRecord, here: list[InstanceRecord], state_cache: ClusterStateCache
) -> dict[str, int]:
    """Return the bytes that each instance frees: its image, and its share of other arena use."""
    images = {i.instance_id: instance_bytes(state_cache, i) for i in here}
    models = sum(1 for nbytes in images.values() if nbytes)
    held = sum(h.bytes for h in node.holdings if Tier.GPU in h.tiers)
    rest = max(0, node.gpu_bytes - node.gpu_free_bytes - held)
    return {id_: nbytes + rest // models if nbytes else 0 for id_, nbytes in images.items()}
