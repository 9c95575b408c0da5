"""What is predicted of a function's starts, for the decision whether to serve while they load (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from gateway.actions import StartOn
from gateway.live_policy import Outlook
from gateway.model_layers import ModelLayers
from gateway.warm_orders import ColdGroups, warm_orders
from rdmacast.plan import CastShape
from rdmacast.planners.subgroups import subgroups
from registry.cast import CastRecord
from registry.live import Live
from registry.node import NodeRecord, Tier

_LINK_BYTES_PER_S = 1.25e9  # of links of which nothing was told: 10 Gbit/s
# From host memory to where the node computes, where nothing better is known.
_HOST_BYTES_PER_S = 4e9
_OWN = -1  # and below: of nodes that get the image in no sub-group's order


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """A start that is made: `group` names the block order in which the image comes. One that loads from its
    own host's memory is number `warm` of `warms`, beside `colds` sub-groups; of others `warms` is 0. `way` is
    what it is to do meanwhile."""

    start: StartOn
    group: int
    warm: int = 0
    warms: int = 0
    colds: int = 0
    way: Live = Live.PIPELINE


def arriving(starts: Sequence[StartOn], nodes: Mapping[str, NodeRecord]) -> tuple[Arriving, ...]:
    warm = [start.node for start in starts if _is_warm(start, nodes)]
    groups = [_group(start.cast, start.node, _OWN - place) for place, start in enumerate(starts)]
    colds = len({group for group in groups if group > _OWN})
    return tuple(
        Arriving(start=start, group=group, warm=warm.index(start.node), warms=len(warm), colds=colds)
        if start.node in warm
        else Arriving(start=start, group=group)
        for start, group in zip(starts, groups, strict=True)
    )


def first_layer(one: Arriving, layers: ModelLayers) -> int:
    """From which layer on it is to load, so that all of them can serve together early."""
    if not one.warms:
        return 0
    cold = ColdGroups(groups=one.colds, rate=_LINK_BYTES_PER_S)
    return warm_orders(layers, one.warms, _HOST_BYTES_PER_S, cold).first_layers[one.warm]


def outlook(
    starts: Sequence[StartOn], nodes: Mapping[str, NodeRecord], *, loading: int, ready: int, held: int
) -> Outlook:
    """`loading` instances load already, `ready` ones serve, and `held` calls wait for a slot.

    A pipeline is there when each of k sub-groups, or of k nodes that load from their own hosts' memory, has
    its kth of the image. What begins alike everywhere is whole nowhere before the first node is.

    A pair of a node that loads and one that is ready serves as much as two whole nodes do once the first has
    half of the layers.
    """
    wait_s = min((_load_s(start, nodes) for start in starts), default=inf)
    coming = arriving(starts, nodes)
    groups = {one.group for one in coming if one.start.cast is not None}
    parts = max(1, len(groups), *(one.warms for one in coming))
    pipeline_s = wait_s / parts if len(starts) + loading > 1 else inf
    queue_s = inf if not ready or held else 0.0
    zigzag_s = wait_s / 2 if ready and held else wait_s if ready or len(starts) + loading > 1 else inf
    return Outlook(wait_s=wait_s, pipeline_s=pipeline_s, queue_s=queue_s, zigzag_s=zigzag_s)


def _load_s(start: StartOn, nodes: Mapping[str, NodeRecord]) -> float:
    nbytes = start.version.image_bytes
    copy_s = nbytes / _HOST_BYTES_PER_S
    if _is_warm(start, nodes):
        return copy_s
    node = nodes.get(start.node)
    rate = None if node is None else node.link_rate_bytes_s
    return max(copy_s, nbytes / (rate or _LINK_BYTES_PER_S))


def _is_warm(start: StartOn, nodes: Mapping[str, NodeRecord]) -> bool:
    """Whether the image is in its own host's memory."""
    node = nodes.get(start.node)
    hosts = {one.host for one in nodes.values() if _holds(one, start.version.image)}
    return start.cast is None and node is not None and node.host in hosts


def _holds(node: NodeRecord, image: str | None) -> bool:
    return any(one.image == image and Tier.HOST in one.tiers for one in node.holdings)


def _group(cast: CastRecord | None, node: str, own: int) -> int:
    """Of the cast's sub-group, which begins with a chunk of its own; `own` where the node is in none."""
    if cast is None:
        return own
    names = [member.node for member in cast.members[: cast.planned]]
    shape = CastShape(nodes=cast.planned, sources=cast.sources, blocks=1)
    for number, group in enumerate(subgroups(shape)):
        if node in {names[member] for member in group}:
            return number
    return own
