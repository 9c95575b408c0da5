"""The load of function versions as input of the scaling policy. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.placement import tier_of
from gateway.planning.plan import PendingStart, VersionDemand
from gateway.planning.policy import FunctionLoad
from registry.records.node import NodeRecord, Tier


def function_loads(
    state_cache: ClusterStateCache,
    demands: Mapping[VersionKey, VersionDemand],
    pending: Iterable[PendingStart],
    stopping: Collection[str],
) -> dict[VersionKey, FunctionLoad]:
    """Return the load of each current version, and of each other one with calls or instances."""
    nodes = len(list(state_cache.usable_nodes()))
    waiting = Counter(start.key for start in pending)
    keys = {*state_cache.instance_keys(), *waiting, *(key for key, demand in demands.items() if demand.held)}
    keys.update(VersionKey(f.name, f.current) for f in state_cache.functions.values())
    loads = {}
    for key in keys:
        head = state_cache.functions.get(key.function)
        if head is None:
            continue
        scaling = head.scaling if head.current == key.version else replace(head.scaling, min_instances=0)
        demand = demands.get(key, VersionDemand())
        coming = [i for i in state_cache.starting(key) if i.instance_id not in stopping]
        loads[key] = FunctionLoad(
            in_flight=demand.in_flight,
            held=demand.held,
            ready=len([i for i in state_cache.ready(key) if i.instance_id not in stopping]),
            starting=waiting[key] + len(coming),
            nodes=nodes,
            scaling=scaling,
        )
    return loads


def loading_nodes(
    image: str,
    state_cache: ClusterStateCache,
    warming: Iterable[tuple[str, str]],
    pending: Iterable[PendingStart],
) -> list[NodeRecord]:
    """Return usable nodes on which the image is arriving, oldest first; `warming` are (image, node)."""
    names = [node for held, node in warming if held == image]
    names += [p.node for p in pending if p.image == image]
    for key in state_cache.instance_keys():
        version = state_cache.version(key)
        if version is not None and version.image == image:
            names += [i.node for i in sorted(state_cache.starting(key), key=lambda i: i.since)]
    found = []
    for name in dict.fromkeys(names):
        entry = state_cache.node(name)
        if entry is not None and entry.usable and tier_of(entry.record, image) in (Tier.DISK, Tier.NONE):
            found.append(entry.record)
    return found
