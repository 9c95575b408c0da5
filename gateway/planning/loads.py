"""What the function versions have to do now and what they have for it, as the policy sees it. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from gateway.directory import Directory, VersionKey
from gateway.placement import tier_of
from gateway.plan import KeyDemand, Pending
from gateway.policy import FunctionLoad
from registry.node import NodeRecord, Tier


def function_loads(
    directory: Directory,
    demands: Mapping[VersionKey, KeyDemand],
    pending: Iterable[Pending],
    stopping: Collection[str],
) -> dict[VersionKey, FunctionLoad]:
    """The load of each current version, and of each other that has calls or instances (or is to)."""
    nodes = len(list(directory.usable_nodes()))
    waiting = Counter(start.key for start in pending)
    keys = {*directory.instance_keys(), *waiting, *(key for key, demand in demands.items() if demand.held)}
    keys.update(VersionKey(f.name, f.current) for f in directory.functions.values())
    loads = {}
    for key in keys:
        head = directory.functions.get(key.function)
        if head is None:
            continue
        scaling = head.scaling if head.current == key.version else replace(head.scaling, min_instances=0)
        demand = demands.get(key, KeyDemand())
        coming = [i for i in directory.coming(key) if i.instance_id not in stopping]
        loads[key] = FunctionLoad(
            in_flight=demand.in_flight,
            held=demand.held,
            ready=len([i for i in directory.ready(key) if i.instance_id not in stopping]),
            starting=waiting[key] + len(coming),
            nodes=nodes,
            scaling=scaling,
        )
    return loads


def loading_nodes(
    image: str, directory: Directory, warming: Iterable[tuple[str, str]], pending: Iterable[Pending]
) -> list[NodeRecord]:
    """Usable nodes on which the image is arriving, oldest first; `warming` are images and nodes."""
    names = [node for held, node in warming if held == image]
    names += [p.node for p in pending if p.image == image]
    for key in directory.instance_keys():
        version = directory.version(key)
        if version is not None and version.image == image:
            names += [i.node for i in sorted(directory.coming(key), key=lambda i: i.since)]
    found = []
    for name in dict.fromkeys(names):
        entry = directory.node(name)
        if entry is not None and entry.usable and tier_of(entry.record, image) in (Tier.DISK, Tier.NONE):
            found.append(entry.record)
    return found
