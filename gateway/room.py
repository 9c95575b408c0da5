"""Room in the arenas: what instances occupy, and which idle ones go when calls wait and nothing fits."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from gateway.directory import Directory, VersionKey
from gateway.policy import FunctionLoad
from registry.function import FunctionVersion
from registry.instance import InstanceRecord
from registry.node import NodeRecord


def used_images(directory: Directory) -> dict[str, set[str]]:
    """The images that instances use, by node."""
    used: dict[str, set[str]] = {}
    for instance in directory.instances():
        version = directory.version(VersionKey(instance.function, instance.version))
        if version is not None and version.image is not None:
            used.setdefault(instance.node, set()).add(version.image)
    return used


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
) -> list[InstanceRecord]:
    """Idle instances that nobody needs now, on the one node where the fewest must go for `version` to fit.

    The oldest go first. None if room is coming already somewhere.
    """
    key = VersionKey(version.function, version.version)
    spare: dict[VersionKey, int] = {}
    for other, load in loads.items():
        need = -(-(load.in_flight + load.held) // load.scaling.target_concurrency)
        spare[other] = load.ready - max(need, load.scaling.min_instances)
    best: list[InstanceRecord] | None = None
    for node in nodes:
        here = [i for i in directory.instances() if i.node == node.id]
        lack = version.image_bytes - node.gpu_free_bytes + reserved_bytes.get(node.id, 0)
        lack -= sum(instance_bytes(directory, i) for i in here if i.instance_id in stopping)
        if lack <= 0:
            return []
        left, victims = Counter(spare), []
        for instance in sorted(here, key=lambda i: i.since):
            other = VersionKey(instance.function, instance.version)
            idle = instance in directory.ready(other) and not in_flight.get(instance.instance_id)
            if lack > 0 and idle and other != key and left[other] > 0:
                left[other] -= 1
                lack -= instance_bytes(directory, instance)
                victims.append(instance)
        if lack <= 0 and (best is None or len(victims) < len(best)):
            best = victims
    return best or []
