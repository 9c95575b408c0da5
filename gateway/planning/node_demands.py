"""How many nodes the platform lacks, and how many it does not need, by pool. Pure.

It lacks nodes for instances that the last step wanted and found no place for; how many is estimated from
below, so that it grows as long as instances remain without a place. An idle node is not needed unless the
host copies of deployed models would not fit in the memory of the other hosts.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from gateway.cluster.state_cache import ClusterStateCache, NodeEntry
from gateway.core.node_demand import NodeDemand, NodePool
from gateway.planning.image_owners import kept_images
from gateway.planning.placement import accelerators, arena_image_bytes, can_run, extra_bytes
from registry.records.function import FunctionVersion
from registry.records.node import NodeRecord, NodeState

_CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedInstances:
    """`count` instances of a version without a place; each takes its image and `min_bytes` of an arena."""

    version: FunctionVersion
    count: int
    min_bytes: int = 0


def pool_of(node: NodeRecord) -> NodePool:
    """Return the pool of a node; an emulated device counts as a GPU."""
    return NodePool(0 if node.device == _CPU else node.gpu_count, node.allows_handlers)


def node_demands(
    cache: ClusterStateCache, unplaced: Iterable[UnplacedInstances], starting_on: Collection[str]
) -> tuple[NodeDemand, ...]:
    """Return the demand of each pool with nodes or need; `starting_on` are nodes with a start requested."""
    entries = [entry for entry in cache.nodes() if entry.record.state is NodeState.READY]
    counts = Counter(pool_of(entry.record) for entry in entries)
    lacking = _lacking([entry.record for entry in entries], unplaced)
    spare = _spare(cache, entries, starting_on)
    return tuple(
        NodeDemand(
            pool=pool,
            nodes=counts[pool],
            lacking=lacking.get(pool, 0),
            spare=0 if lacking.get(pool) else spare[pool],
        )
        for pool in sorted(counts.keys() | lacking.keys())
    )


def _lacking(nodes: Sequence[NodeRecord], unplaced: Iterable[UnplacedInstances]) -> dict[NodePool, int]:
    """Return how many further nodes each pool needs at least."""
    kinds = {(pool_of(node), node.gpu_bytes, node.device, node.engines): node for node in nodes}
    by_pool: dict[NodePool, list[tuple[UnplacedInstances, int]]] = defaultdict(list)
    for one in unplaced:
        able = [node for node in kinds.values() if can_run(one.version, node)]
        if able:
            # Handlers' nodes are for handlers where there are others; of those the largest.
            best = min(able, key=lambda node: (node.allows_handlers, -node.gpu_bytes, pool_of(node)))
            by_pool[pool_of(best)].append((one, best.gpu_bytes))
        elif not nodes:
            pool = NodePool(accelerators(one.version), one.version.runs_user_code)
            by_pool[pool].append((one, 0))
    return {pool: _nodes_for(found) for pool, found in by_pool.items()}


def _nodes_for(unplaced: Iterable[tuple[UnplacedInstances, int]]) -> int:
    """Return how many empty nodes these instances take at least; an arena of 0 bytes takes any of them.

    Instances of one version are on different nodes, and of those larger than half of an arena each has its
    own; an instance larger than an arena is a group of several.
    """
    most = large = 0
    arenas = 0.0
    for one, arena_bytes in unplaced:
        need = arena_image_bytes(one.version) + extra_bytes(one.version, one.min_bytes)
        each = need / arena_bytes if arena_bytes else 0.0
        members = max(1, -int(-each // 1))
        most = max(most, one.count * members)
        large += one.count * members if each > 1 / 2 else 0
        arenas += one.count * each
    return max(most, large, -int(-arenas // 1))


def _spare(
    cache: ClusterStateCache, entries: Sequence[NodeEntry], starting_on: Collection[str]
) -> Counter[NodePool]:
    """Return how many idle nodes of each pool are not needed for the kept host copies either."""
    kept_bytes = _kept_bytes(cache)
    by_host: dict[str, list[NodeRecord]] = defaultdict(list)
    for entry in entries:
        by_host[entry.record.host].append(entry.record)
    remaining = {host: len(nodes) for host, nodes in by_host.items()}
    host_bytes = {host: max(node.host_bytes for node in nodes) for host, nodes in by_host.items()}
    total_bytes = sum(host_bytes.values())
    spare: Counter[NodePool] = Counter()
    for entry in entries:
        node = entry.record
        if not entry.usable or node.id in starting_on or cache.index.instances_on(node.id):
            continue
        if remaining[node.host] == 1:
            left_bytes = total_bytes - host_bytes[node.host]
            if kept_bytes and (left_bytes < kept_bytes or not left_bytes):
                continue
            total_bytes = left_bytes
        remaining[node.host] -= 1
        spare[pool_of(node)] += 1
    return spare


def _kept_bytes(cache: ClusterStateCache) -> int:
    """Return the bytes of all images of which a host copy is kept."""
    total = 0
    for image in kept_images(cache):
        total += max((version.image_bytes for version in cache.versions(image)), default=0)
    return total
