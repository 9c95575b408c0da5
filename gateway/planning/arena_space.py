"""Room in the arenas: what instances occupy, and which idle ones go when calls wait and nothing fits."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from gateway.directory import Directory, VersionKey
from gateway.needs import Needs
from gateway.placement import arena_room, image_need
from gateway.plan import Pending
from gateway.policy import FunctionLoad
from registry.function import FunctionVersion
from registry.instance import InstanceRecord, InstanceState
from registry.node import NodeRecord, Tier


def used_images(directory: Directory) -> dict[str, set[str]]:
    """The images that instances use, by node."""
    used: dict[str, set[str]] = {}
    for instance in directory.instances():
        version = directory.version(VersionKey(instance.function, instance.version))
        if version is not None and version.image is not None:
            used.setdefault(instance.node, set()).add(version.image)
    return used


def reserved_bytes(directory: Directory, pending: Iterable[Pending], needs: Needs) -> dict[str, int]:
    """Arena bytes by node that starts are to take and the nodes' records do not show yet.

    A node tells of an instance that is loading only after its record shows the region.
    """
    coming = [(p.key, p.node) for p in pending]
    coming += [
        (VersionKey(i.function, i.version), i.node)
        for i in directory.instances()
        if i.state is InstanceState.STARTING
    ]
    reserved: Counter[str] = Counter()
    for key, node in coming:
        version, entry = directory.version(key), directory.node(node)
        if version is not None and entry is not None:
            reserved[node] += image_need(version, entry.record) + needs.wish_bytes(version)
    return reserved


def instance_bytes(directory: Directory, instance: InstanceRecord) -> int:
    """Arena bytes of the instance's image."""
    version = directory.version(VersionKey(instance.function, instance.version))
    return version.image_bytes if version is not None and version.image is not None else 0


def choose_victims(
    version: FunctionVersion,
    nodes: Iterable[NodeRecord],
    directory: Directory,
    loads: Mapping[VersionKey, FunctionLoad],
    *,
    in_flight: Mapping[str, int],
    reserved_bytes: Mapping[str, int],
    stopping: Collection[str],
    least_bytes: int = 0,
) -> list[InstanceRecord]:
    """Idle instances that nobody needs now, on the one node where the fewest must go for `version` to fit.

    The oldest go first. None if room is coming already somewhere.
    """
    key = VersionKey(version.function, version.version)
    used = used_images(directory)
    spare: dict[VersionKey, int] = {}
    for other, load in loads.items():
        need = -(-(load.in_flight + load.held) // load.scaling.target_concurrency)
        spare[other] = load.ready - max(need, load.scaling.min_instances)
    best: list[InstanceRecord] | None = None
    for node in nodes:
        here = [i for i in directory.instances() if i.node == node.id]
        freed = _freed_bytes(node, here, directory)
        lack = image_need(version, node) + least_bytes + reserved_bytes.get(node.id, 0)
        lack -= arena_room(node, version.image, used.get(node.id, ()))
        lack -= sum(freed[i.instance_id] for i in here if is_leaving(i, stopping))
        if lack <= 0:
            return []
        left, victims = Counter(spare), []
        for instance in sorted(here, key=lambda i: i.since):
            other = VersionKey(instance.function, instance.version)
            idle = instance in directory.ready(other) and not in_flight.get(instance.instance_id)
            if lack > 0 and idle and other != key and left[other] > 0:
                left[other] -= 1
                lack -= freed[instance.instance_id]
                victims.append(instance)
        if lack <= 0 and (best is None or len(victims) < len(best)):
            best = victims
    return best or []


def is_leaving(instance: InstanceRecord, stopping: Collection[str]) -> bool:
    """Whether the instance takes nothing new any more and goes once its calls are over."""
    return instance.state is InstanceState.DRAINING or instance.instance_id in stopping


def _freed_bytes(node: NodeRecord, here: list[InstanceRecord], directory: Directory) -> dict[str, int]:
    """What each instance gives back when it goes: its image, and its share of what no image explains."""
    images = {i.instance_id: instance_bytes(directory, i) for i in here}
    models = sum(1 for nbytes in images.values() if nbytes)
    held = sum(h.bytes for h in node.holdings if Tier.GPU in h.tiers)
    rest = max(0, node.gpu_bytes - node.gpu_free_bytes - held)
    return {id_: nbytes + rest // models if nbytes else 0 for id_, nbytes in images.items()}
