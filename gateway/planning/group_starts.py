"""Starts of groups in a planning step: which sets of nodes start, and what has to stop for one.

Pure but for what it keeps: the layers of the models that need groups.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.cluster.node_index import NodeKind
from gateway.cluster.node_space import holds
from gateway.cluster.state_cache import VersionKey
from gateway.planning.actions import FetchLayersAction
from gateway.planning.arena_space import ArenaSpace, SpaceRequest, freeable
from gateway.planning.groups import (
    GroupCandidate,
    GroupPart,
    LayerSizes,
    as_group,
    can_be_group,
    choose_group,
)
from gateway.planning.placement import can_run, too_small
from gateway.planning.plan import Plan
from gateway.planning.policy import FunctionLoad
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceGroup, InstanceRecord
from registry.records.node import NodeRecord, Tier

_MAX_MODELS = 64


class GroupPlanner:
    """The planner of groups of one controller."""

    def __init__(self, new_id: Callable[[VersionKey], str]) -> None:
        self._new_id = new_id
        self._sizes: dict[str, LayerSizes | None] = {}  # by manifest; None: it cannot be divided
        self._reading: set[str] = set()

    def __repr__(self) -> str:
        return f"<GroupPlanner {len(self._sizes)} models, {len(self._reading)} being read>"

    def needed(self, version: FunctionVersion, kinds: Sequence[NodeRecord], min_bytes: int) -> bool:
        """Return whether the version fits no node of any kind, but perhaps several together."""
        able = [node for node in kinds if can_run(version, node)]
        return can_be_group(version) and bool(able) and all(too_small(n, version, min_bytes) for n in able)

    def is_known(self, version: FunctionVersion, plan: Plan) -> bool:
        """Return whether the version's layers are known; else they are read, and it is planned again then."""
        manifest = version.manifest or ""
        if manifest in self._sizes:
            return True
        if manifest not in self._reading:
            self._reading.add(manifest)
            plan.actions.append(FetchLayersAction(version=version))
        return False

    def on_layers(self, version: FunctionVersion, sizes: LayerSizes | None) -> None:
        """Record the layers of a version, None if its image cannot be divided."""
        self._reading.discard(version.manifest or "")
        self._sizes[version.manifest or ""] = sizes
        while len(self._sizes) > _MAX_MODELS:
            del self._sizes[next(iter(self._sizes))]

    def on_layers_failed(self, version: FunctionVersion) -> None:
        """Record that the layers were not read: they are read again."""
        self._reading.discard(version.manifest or "")

    def choose(self, wanted: SpaceRequest, space: ArenaSpace, used: Collection[str]) -> InstanceGroup | None:
        """Return a group on nodes with room now, without the nodes `used`; None if there is none."""
        sizes, version = self._sizes[wanted.version.manifest or ""], wanted.version
        if sizes is None:
            return None
        candidates = self._candidates(wanted, space, {}, used)
        parts = choose_group(sizes, candidates, wanted.min_bytes)
        if parts is None:
            return None
        key = VersionKey(version.function, version.version)
        return as_group(parts, sizes.head_first, lambda: self._new_id(key))

    def why_never(self, wanted: SpaceRequest, nodes: Sequence[NodeRecord]) -> str:
        """Return why not even the empty arenas of these nodes could hold it, "" if they could."""
        sizes, version = self._sizes[wanted.version.manifest or ""], wanted.version
        if sizes is None:
            return (
                f"the image has {version.image_bytes} bytes, more than any accelerator arena, "
                "and is not a single sequence of layers that several nodes could share"
            )
        candidates = [
            GroupCandidate(node=node.id, host=node.host, leaf=node.leaf, room_bytes=node.gpu_bytes)
            for node in nodes
            if can_run(version, node)
        ]
        if choose_group(sizes, candidates, wanted.min_bytes) is not None:
            return ""
        largest = sorted((one.room_bytes for one in candidates), reverse=True)
        arenas = ", ".join(map(str, largest[:8])) or "none"
        return (
            f"no nodes can share the image of {version.image_bytes} bytes with its KV cache: "
            f"the accelerator arenas have {arenas} bytes (raise --gpu-memory or add nodes)"
        )

    def choose_victims(
        self,
        wanted: SpaceRequest,
        space: ArenaSpace,
        loads: Mapping[VersionKey, FunctionLoad],
        *,
        in_flight: Mapping[str, int],
        stopping: Collection[str],
    ) -> tuple[Sequence[GroupPart], list[InstanceRecord]]:
        """Return a group that there is room for once idle surplus has stopped, and what of it must stop."""
        sizes = self._sizes[wanted.version.manifest or ""]
        freed = freeable(wanted, space, loads, in_flight=in_flight, stopping=stopping)
        if sizes is None or not freed:
            return (), []
        more = {node: sum(one.nbytes for one in found) for node, found in freed.items()}
        parts = choose_group(sizes, self._candidates(wanted, space, more, ()), wanted.min_bytes)
        victims: dict[str, InstanceRecord] = {}
        for part in parts or ():
            room = space.room(space.index.usable[part.node], None)
            need = sizes.need_bytes(part.first, part.last, wanted.min_bytes)
            for one in freed.get(part.node, ()):
                if room < need:
                    room += one.nbytes
                    victims |= {} if one.stop is None else {one.stop.instance_id: one.stop}
        return parts or (), list(victims.values())

    def _candidates(
        self, wanted: SpaceRequest, space: ArenaSpace, more: Mapping[str, int], used: Collection[str]
    ) -> list[GroupCandidate]:
        image = wanted.version.image or ""
        runs: dict[NodeKind, bool] = {}
        found = []
        for node in space.index.usable.values():
            kind = space.index.space(node.id).kind
            if kind not in runs:
                runs[kind] = can_run(wanted.version, kind)
            if not runs[kind] or node.id in used or node.id not in wanted.free:
                continue
            room_bytes = min(node.gpu_bytes, space.room(node, None) + more.get(node.id, 0))
            found.append(
                GroupCandidate(
                    node=node.id,
                    host=node.host,
                    leaf=node.leaf,
                    room_bytes=room_bytes,
                    holds=holds(node, image, Tier.HOST),
                )
            )
        return found
