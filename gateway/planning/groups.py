"""Groups: which nodes share an image that fits none of them, and which layers each has. Pure.

The fewest nodes whose free arenas add up; of as many those of one host, then those under one leaf switch,
then those that hold the image in host memory. Layers are divided by the nodes' rooms.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from registry.images.manifest import Manifest, layer_extent
from registry.records.engine import EngineKind
from registry.records.function import FunctionTask, FunctionVersion
from registry.records.instance import GroupMember, InstanceGroup, InstanceRecord

MAX_MEMBERS = 8
_KV_SHARE = 8  # the KV cache is estimated as this part of the layers
_MAX_ORDERED = 4  # members of which all orders are tried
_HALVINGS = 16  # bisection steps for the fullest member


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The bytes `[starts[i], ends[i])` of the image that layer i needs, in whole units.

    The embedding belongs to the first layer, the final norm and the head to the last one; with `head_first`
    the head is the embedding.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    head_first: bool

    def __len__(self) -> int:
        return len(self.starts)

    def part_bytes(self, first: int, last: int) -> int:
        """Return the bytes of the layers `[first, last)`."""
        return self.ends[last - 1] - self.starts[first]

    def need_bytes(self, first: int, last: int, kv_bytes: int) -> int:
        """Return the arena bytes of a member with these layers.

        `kv_bytes` is what the KV cache of all layers is known to take at least, 0 if that is unknown.
        """
        part = self.part_bytes(first, last)
        return part + max(part // _KV_SHARE, -(-kv_bytes * (last - first) // len(self)))


def layer_sizes(manifest: Manifest) -> LayerSizes | None:
    """Return the sizes of a model's layers, None if it is not a single sequence of layers."""
    count = manifest.num_layers
    if count < 1 or len({span.tower for span in manifest.layers}) != 1:
        return None
    extents = [layer_extent(manifest, layer, layer + 1) for layer in range(count)]
    starts, ends = tuple(start for start, _ in extents), tuple(end for _, end in extents)
    if any(start >= end for start, end in extents) or list(starts) != sorted(starts):
        return None
    return LayerSizes(starts=starts, ends=ends, head_first=manifest.tied_head)


def can_be_group(version: FunctionVersion) -> bool:
    """Return whether the nodes' own engine runs the version on several nodes: a generative model."""
    generates = version.task is FunctionTask.GENERATE and version.manifest is not None
    return generates and version.image is not None and version.engine is EngineKind.NATIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCandidate:
    """A node that could be a member, with `room_bytes` for its layers and their KV cache.

    `holds`: its host memory has the image.
    """

    node: str
    host: str
    leaf: str
    room_bytes: int
    holds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    """The layers `[first, last)` of a member on `node`: `image_bytes` bytes."""

    node: str
    first: int
    last: int
    image_bytes: int


def choose_group(
    sizes: LayerSizes, candidates: Sequence[GroupCandidate], kv_bytes: int = 0
) -> tuple[GroupPart, ...] | None:
    """Choose the members of a group, in layer order; None if no set of at most MAX_MEMBERS has the room."""
    able = sorted(candidates, key=_by_room)
    whole = sizes.part_bytes(0, len(sizes))
    for count in range(2, min(MAX_MEMBERS, len(able), len(sizes)) + 1):
        if sum(one.room_bytes for one in able[:count]) < whole:
            continue
        for scope in _scopes(able, count):
            if (parts := _of_scope(sizes, scope, count, kv_bytes)) is not None:
                return parts
    return None


def as_group(parts: Sequence[GroupPart], head_first: bool, new_id: Callable[[], str]) -> InstanceGroup:
    """Return the group of these parts, with an id for each member's instance."""
    members = tuple(
        GroupMember(
            node=part.node,
            instance_id=new_id(),
            first=part.first,
            last=part.last,
            image_bytes=part.image_bytes,
        )
        for part in parts
    )
    return InstanceGroup(members=members, head=0 if head_first else len(members) - 1)


def broken_groups(
    instances: Iterable[InstanceRecord], is_there: Callable[[GroupMember], bool]
) -> Iterator[InstanceRecord]:
    """Yield the members of groups that cannot serve, as not all of their members are there."""
    known: dict[InstanceGroup, bool] = {}
    for instance in instances:
        if (group := instance.group) is not None:
            if group not in known:
                known[group] = all(map(is_there, group.members))
            if not known[group]:
                yield instance


# --- inside


def _by_room(one: GroupCandidate) -> tuple[int, str]:
    return -one.room_bytes, one.node


def _scopes(able: Sequence[GroupCandidate], count: int) -> Iterator[Sequence[GroupCandidate]]:
    """Yield the nodes of each host, those under each leaf switch, and all, if there are so many."""
    for name in ("host", "leaf"):
        scopes: dict[str, list[GroupCandidate]] = {}
        for one in able:
            if getattr(one, name):
                scopes.setdefault(getattr(one, name), []).append(one)
        # Those with the most holders first, then those with the most room.
        ordered = sorted(
            scopes.values(),
            key=lambda scope: (-sum(one.holds for one in scope), *map(_by_room, scope[:1])),
        )
        yield from (scope for scope in ordered if len(scope) >= count)
    yield able


def _of_scope(
    sizes: LayerSizes, scope: Sequence[GroupCandidate], count: int, kv_bytes: int
) -> tuple[GroupPart, ...] | None:
    """Return a group of `count` nodes of the scope, with holders where that is possible."""
    holders_first = sorted(scope, key=lambda one: (not one.holds, *_by_room(one)))
    for chosen in (holders_first[:count], scope[:count]):
        for order in _orders(chosen):
            if (parts := _divide(sizes, order, kv_bytes)) is not None:
                return parts
    return None


def _orders(chosen: Sequence[GroupCandidate]) -> Iterable[Sequence[GroupCandidate]]:
    if len(chosen) <= _MAX_ORDERED:
        return permutations(chosen)
    return (chosen, chosen[::-1])


def _divide(
    sizes: LayerSizes, order: Sequence[GroupCandidate], kv_bytes: int
) -> tuple[GroupPart, ...] | None:
    """Divide the layers in this order of nodes so that the fullest one is as empty as possible."""
    best = _filled(sizes, order, kv_bytes, 1.0)
    if best is None:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        parts = _filled(sizes, order, kv_bytes, share)
        if parts is None:
            low = share
        else:
            best, high = parts, share
    return best


def _filled(
    sizes: LayerSizes, order: Sequence[GroupCandidate], kv_bytes: int, share: float
) -> tuple[GroupPart, ...] | None:
    """Return the parts if each node takes as many layers as fit into that share of its room."""
    parts: list[GroupPart] = []
    first, layers = 0, len(sizes)
    for place, one in enumerate(order):
        most = layers - (len(order) - 1 - place)  # each of the others has a layer, too
        last = first
        while last < most and sizes.need_bytes(first, last + 1, kv_bytes) <= share * one.room_bytes:
            last += 1
        if last == first:
            return None
        part = GroupPart(node=one.node, first=first, last=last, image_bytes=sizes.part_bytes(first, last))
        parts.append(part)
        first = last
    return tuple(parts) if first == layers else None
