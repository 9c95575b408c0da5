"""Placement: which nodes start, and which instances stop. Pure.

Starts prefer the nearest tier, then spread over hosts.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from gateway.cluster.node_index import NodeKind
from gateway.cluster.node_space import (
    NEAREST,
    arena_room,
    holds,
    host_room_bytes,
    idle_used_at,
    tier_of,
)
from gateway.planning.groups import MAX_MEMBERS, can_be_group
from registry.config.devices import is_cuda
from registry.config.emulation import mismatch
from registry.config.engine_args import workers_of
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.node import NodeRecord, Tier

_ENGINE_HINTS = {EngineKind.VLLM: "start an invoker with --vllm-python PATH"}
_LOADING_RANK = 2  # the image is arriving on this host already
_KV_SHARE = 8  # the KV cache is estimated as this part of the image

_GroupKey = tuple[int, bool, bool, str]  # rank, tight, crowded, host
_Emptiness = tuple[int, int, float, str]
_HeapEntry = tuple[tuple[int, bool, bool], int, _Emptiness, _GroupKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCandidate:
    """A node as a candidate for a start of one image.

    `free_bytes` includes arena space of idle images, the last of which was used at `idle_used_at`; a start
    takes at least `need_bytes` (None: none at all), and preferably `preferred_bytes`. `instances` counts
    those on the node. `rank`: 0 the accelerator holds the image, 1 its host, 2 its host is loading it, 3 its
    disk holds it, 4 none. `crowded`: the image would evict pinned copies from the host's memory.
    """

    id: str
    host: str
    rank: int
    free_bytes: int
    instances: int
    need_bytes: int | None = None
    preferred_bytes: int = 0
    crowded: bool = False
    idle_used_at: float = 0.0

    @property
    def fits(self) -> bool:
        return self.need_bytes is None or self.free_bytes >= self.need_bytes

    @property
    def tight(self) -> bool:
        return self.free_bytes < self.preferred_bytes


def start_candidates(
    version: FunctionVersion,
    nodes: Sequence[NodeRecord],
    *,
    used_images: Mapping[str, Collection[str]],
    reserved_bytes: Mapping[str, int],
    instances: Mapping[str, int],
    loading_hosts: Collection[str],
    min_bytes: int = 0,
    preferred_bytes: int = 0,
) -> list[StartCandidate]:
    """Describe `nodes` as candidates for `version`; `reserved_bytes` belong to starts in progress.

    Besides its image an instance takes at least `min_bytes` of the arena, preferably `preferred_bytes`.
    """
    image = version.image
    host_holders = {n.host for n in nodes if image and holds(n, image, Tier.HOST)}
    found = []
    for node in nodes:
        if not can_run(version, node):
            continue
        rank = NEAREST[tier_of(node, image)] if image else 0
        if node.host in host_holders or node.host in loading_hosts:
            rank = min(rank, NEAREST[Tier.HOST] if node.host in host_holders else _LOADING_RANK)
        used = used_images.get(node.id, ())
        room = arena_room(node, image, used) - reserved_bytes.get(node.id, 0)
        found.append(
            StartCandidate(
                id=node.id,
                host=node.host,
                rank=rank,
                free_bytes=room,
                instances=instances.get(node.id, 0),
                need_bytes=image_need(version, node) + min_bytes if image else None,
                preferred_bytes=image_need(version, node) + max(min_bytes, preferred_bytes),
                crowded=rank > NEAREST[Tier.HOST] and host_room_bytes(node) < version.image_bytes,
                idle_used_at=idle_used_at(node, used),
            )
        )
    return found


def can_run(version: FunctionVersion, node: NodeRecord | NodeKind) -> bool:
    """Return whether the node runs handlers, if the version needs that, and models of its architecture.

    With another engine than the node's own, the node must have that one, and the GPUs that it divides the
    model among.
    """
    if version.runs_user_code and not node.allows_handlers:
        return False
    if not has_accelerators(version, node):
        return False
    if version.image is not None and version.engine not in node.engines:
        return False
    return version.image is None or not mismatch(version.architecture, node.device)


def accelerators(version: FunctionVersion) -> int:
    """Return how many GPUs an instance computes with, all of one node."""
    return workers_of(version.engine_args) if version.engine is EngineKind.VLLM else 1


def has_accelerators(version: FunctionVersion, node: NodeRecord | NodeKind) -> bool:
    """Return whether the node's GPUs are as many as an instance computes with.

    An instance has all of its node's, and pays for them. Any CPU runs any number of processes.
    """
    return not is_cuda(node.device) or node.gpu_count == accelerators(version)


def arena_image_bytes(version: FunctionVersion) -> int:
    """Return what an instance has of the image in the arena: nothing if only another engine runs it."""
    return version.image_bytes if version.runs_natively else 0


def image_need(version: FunctionVersion, node: NodeRecord) -> int:
    """Return the additional arena bytes of the image: 0 where the accelerator holds it already."""
    if version.image is None or tier_of(node, version.image) is Tier.GPU:
        return 0
    return arena_image_bytes(version)


def extra_bytes(version: FunctionVersion, min_bytes: int) -> int:
    """Return the arena bytes to reserve besides the image: an estimate, or what failed starts showed.

    Only the node knows how large a KV cache must be at least; a start without enough space reports it.
    """
    return max(arena_image_bytes(version) // _KV_SHARE if _has_kv(version) else 0, min_bytes)


def start_bytes(
    version: FunctionVersion, node: NodeRecord, room: int, min_bytes: int, part_bytes: int | None = None
) -> int:
    """Return the most that a start takes of `room` bytes of the node's arena.

    That is the image, or the part that a member of a group has, and for the KV cache up to half of the rest.
    """
    image_bytes = image_need(version, node) if part_bytes is None else part_bytes
    half = max(0, room - image_bytes) // 2 if _has_kv(version) else 0
    return image_bytes + max(half, extra_bytes(version, min_bytes))


def _has_kv(version: FunctionVersion) -> bool:
    return version.runs_natively and version.task is FunctionTask.GENERATE


def choose_starts(count: int, candidates: Iterable[StartCandidate]) -> list[StartCandidate]:
    """Choose up to `count` candidates.

    The order is: nearest tier, ample arena space, no eviction of pinned copies, the host with the fewest
    chosen, the emptiest node, where idle images were used longest ago.
    """
    groups: dict[_GroupKey, list[StartCandidate]] = {}
    for site in candidates:
        if site.fits:
            groups.setdefault((site.rank, site.tight, site.crowded, site.host), []).append(site)
    for members in groups.values():
        members.sort(key=_emptiness, reverse=True)
    chosen: list[StartCandidate] = []
    on_host: Counter[str] = Counter()
    # The best of each group; its count of the host's starts may be outdated, and is then too low.
    heap = [_heap_entry(group, members[-1], 0) for group, members in groups.items()]
    heapify(heap)
    while heap and len(chosen) < count:
        _, started, _, group = heap[0]
        host = group[-1]
        if started == on_host[host]:
            chosen.append(groups[group].pop())
            on_host[host] += 1
        if groups[group]:
            heapreplace(heap, _heap_entry(group, groups[group][-1], on_host[host]))
        else:
            heappop(heap)
    return chosen


def _heap_entry(group: _GroupKey, site: StartCandidate, on_host: int) -> _HeapEntry:
    return group[:3], on_host, _emptiness(site), group


def _emptiness(site: StartCandidate) -> _Emptiness:
    return site.instances, -site.free_bytes, site.idle_used_at, site.id


def choose_stops(
    count: int,
    ready: Iterable[InstanceRecord],
    coming: Iterable[InstanceRecord],
    *,
    in_flight: Mapping[str, int],
    keep_on: Collection[str] = (),
    loader: str | None = None,
) -> list[InstanceRecord]:
    """Choose `count` instances to stop.

    The order is: not on `keep_on`, idle before busy, starting before ready, not on the `loader`, from which
    the other starts get the image, the youngest first. A busy one finishes its calls.
    """

    def rank(one: InstanceRecord, order: int) -> tuple[bool, int, int, bool, float, str]:
        calls = in_flight.get(one.instance_id, 0)
        return one.node in keep_on, calls, order, one.node == loader, -one.since, one.instance_id

    rows = [(rank(i, order), i) for order, group in enumerate((coming, ready)) for i in group]
    return [instance for _, instance in sorted(rows, key=lambda row: row[0])[:count]]


def unschedulable_reason(version: FunctionVersion, nodes: Sequence[NodeRecord]) -> str:
    """Return why no node can ever start the version, "" if one can (or if there are no nodes)."""
    if not nodes:
        return ""
    able = nodes
    if version.runs_user_code:
        able = [node for node in nodes if node.allows_handlers]
        if not able:
            return "handlers are not allowed on any node (start an invoker with --allow-handlers)"
    if version.image is not None and version.engine is not EngineKind.NATIVE:
        able = [node for node in able if version.engine in node.engines]
        if not able:
            return f"no node has the engine {version.engine} ({_ENGINE_HINTS[version.engine]})"
    if not any(has_accelerators(version, node) for node in able):
        return _lacks_accelerators(version)
    able = [node for node in able if has_accelerators(version, node)]
    if version.image is not None:
        reasons = {node.id: mismatch(version.architecture, node.device) for node in able}
        able = [node for node in able if not reasons[node.id]]
        if not able:
            return f"no node can run it: {next(iter(reasons.values()))}"
    largest = max(node.gpu_bytes for node in able)
    if largest and arena_image_bytes(version) > largest:
        return _too_large(version, able, largest)
    return ""


def _lacks_accelerators(version: FunctionVersion) -> str:
    count = accelerators(version)
    if count == 1:
        return "it computes with one GPU, and every node has several (start an invoker with --device cuda:0)"
    example = ",".join(map(str, range(count)))
    return (
        f"its engine_args divide the model among {count} GPUs, and no node has exactly {count} "
        f"(start an invoker with --device cuda:{example})"
    )


def _too_large(version: FunctionVersion, able: Sequence[NodeRecord], largest: int) -> str:
    """Return why no group of nodes has the arenas for the image either, "" if one has."""
    reason = f"the image has {version.image_bytes} bytes, the largest accelerator arena only {largest}"
    if not can_be_group(version):
        return reason
    arenas = sorted((node.gpu_bytes for node in able), reverse=True)[:MAX_MEMBERS]
    if len(arenas) > 1 and sum(arenas) >= version.image_bytes:
        return ""
    if len(arenas) < 2:
        return f"{reason}, and there is no other node for a part of it"
    together = f"the {len(arenas)} largest together only {sum(arenas)}"
    return f"{reason}, and {together} (raise --gpu-memory or add nodes)"


def too_small(node: NodeRecord, version: FunctionVersion, min_bytes: int) -> bool:
    """Return whether even the node's empty arena is too small for the image and `min_bytes`."""
    return bool(node.gpu_bytes) and arena_image_bytes(version) + min_bytes > node.gpu_bytes
