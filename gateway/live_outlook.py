"""What is predicted of a function's starts, for the decision whether to serve while they load (pure).

By what casts showed of the nodes' links, by the casts' plans, and by what earlier starts took. How long the
instances that serve need for what waits is not predicted: one with room makes nobody wait, and one without
counts as if it never had any.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median_low

from gateway.actions import StartOn
from gateway.cast_forecast import forecast
from gateway.known_links import KnownLinks
from gateway.live_policy import Outlook
from gateway.model_layers import ModelLayers
from gateway.warm_orders import layer_at, warm_places
from rdmacast.plan import CastShape
from rdmacast.planners.subgroups import subgroups
from registry.cast import CastRecord
from registry.instance import InstanceRecord, StartKind
from registry.live import Live
from registry.node import NodeRecord, Tier

_LINK_BYTES_PER_S = 1.25e9  # of links of which nothing was told: 10 Gbit/s
# From host memory to where the node computes, where nothing better is known.
_HOST_BYTES_PER_S = 4e9
_FIXED = ("reserve", "bind", "ready")  # the phases of a start that take as long with any image
_OWN = -1  # and below: of nodes that get the image in no sub-group's order


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """A start that is made: `group` names the block order in which the image comes. `place` is where in the
    model that begins, as a part of its cost (None: not known). One that loads from its own host's memory, in
    an order that it can be told, is one of `warms`; of others that is 0. `lone`: one host has the model, and
    gives it to all others in one order of blocks. `way` is what it is to do meanwhile."""

    start: StartOn
    group: int
    warms: int = 0
    place: float | None = None
    lone: bool = False
    way: Live = Live.PIPELINE


def arriving(
    starts: Sequence[StartOn], nodes: Mapping[str, NodeRecord], begun: Collection[float] = ()
) -> tuple[Arriving, ...]:
    """Starts that are made together, where other loads of the model have begun at `begun`."""
    cold = {start.instance_id: _in_cast(start.cast, start.node) for start in starts}
    parts = {group / groups for group, groups in filter(None, cold.values())}
    warm = [start.instance_id for start in starts if _is_warm(start, nodes)]
    holding = {node.host for start in starts for node in nodes.values() if _holds(node, start.version.image)}
    places = warm_places(len(warm), {*begun, *parts}, casts=max(1, len(holding)))
    own = dict(zip(warm, places, strict=True))
    one_order = all(groups == 1 for _, groups in filter(None, cold.values()))
    lone = len(holding) == 1 and len(warm) <= 1 and one_order
    found = []
    for number, start in enumerate(starts):
        of_cast = cold[start.instance_id]
        if of_cast is not None:
            found.append(Arriving(start=start, group=of_cast[0], place=of_cast[0] / of_cast[1]))
        elif start.instance_id in own:
            place = own[start.instance_id]
            found.append(Arriving(start=start, group=_OWN - number, warms=len(warm), place=place))
        else:
            found.append(Arriving(start=start, group=_OWN - number))
    return tuple(replace(one, lone=lone) for one in found)


def first_layer(one: Arriving, layers: ModelLayers) -> int:
    """From which layer on it is to load, so that all of them can serve together early."""
    return layer_at(layers, one.place) if one.warms and one.place is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCosts:
    """What starts took: `copy_bytes_per_s` from host memory to where the node computes, and `fixed_s` for all
    that does not grow with the image. `said`: in a few words, how they are known."""

    copy_bytes_per_s: float = _HOST_BYTES_PER_S
    fixed_s: float = 0.0
    said: str = f"{_HOST_BYTES_PER_S / 1e9:g} GB/s from host memory assumed"


def start_costs(ready: Iterable[InstanceRecord], nbytes: Mapping[tuple[str, int], int]) -> StartCosts:
    """As the instances that serve took them; `nbytes` by function and version. A copy tells its rate only
    where nothing was fetched meanwhile."""
    told = [one for one in ready if one.phases_ms]
    if not told:
        return StartCosts()
    fixed_s = median_low([sum(one.phases_ms.get(phase, 0.0) for phase in _FIXED) / 1e3 for one in told])
    rates = [
        nbytes[one.function, one.version] / copy_ms * 1e3
        for one in told
        if one.start_kind is StartKind.WARM
        and (copy_ms := one.phases_ms.get("copy", 0.0)) > 0
        and nbytes.get((one.function, one.version))
    ]
    if not rates:
        return StartCosts(fixed_s=fixed_s)
    rate = median_low(rates)
    said = f"{rate / 1e9:.3g} GB/s from host memory as in {len(rates)} starts"
    return StartCosts(copy_bytes_per_s=rate, fixed_s=fixed_s, said=said)


def outlook(
    starts: Sequence[StartOn],
    nodes: Mapping[str, NodeRecord],
    links: KnownLinks,
    costs: StartCosts,
    *,
    coming: Sequence[InstanceRecord],
    ready: int,
    held: int,
) -> Outlook:
    """`coming` instances load already, `ready` ones serve, and `held` calls wait for a slot.

    A pipeline is there when the cast's plan says so, or when each of k nodes that load from their own hosts'
    memory has its kth of the image. What begins alike everywhere is whole nowhere before the first node is.

    A pair of a node that loads and one that is ready serves as much as two whole nodes do once the first has
    half of the layers.
    """
    found, image_bytes = arriving(starts, nodes), starts[0].version.image_bytes
    waits = [_whole_s(start, nodes, links, costs) for start in starts]
    for other in coming:
        link_s = image_bytes / links.rates.get(other.node, _LINK_BYTES_PER_S)
        waits.append(costs.fixed_s + (1 - other.progress) * link_s)
    wait_s = min(waits)
    several = len(starts) + len(coming) > 1
    pipeline_s = min([wait_s, *(_part_s(one, links, costs) for one in found)]) if several else inf
    queue_s = inf if not ready or held else 0.0
    zigzag_s = wait_s / 2 if ready and held else wait_s if ready or several else inf
    said = costs.said if any(one.warms for one in found) else f"{image_bytes / 1e6:.3g} MB, {links.said}"
    return Outlook(
        wait_s=wait_s, pipeline_s=pipeline_s, queue_s=queue_s, zigzag_s=zigzag_s, said=said, alone=not several
    )


def _whole_s(start: StartOn, nodes: Mapping[str, NodeRecord], links: KnownLinks, costs: StartCosts) -> float:
    copy_s = start.version.image_bytes / costs.copy_bytes_per_s
    if _is_warm(start, nodes):
        return costs.fixed_s + copy_s
    copies = 1.0 if start.cast is None else forecast(start.cast).whole
    return costs.fixed_s + max(copy_s, copies * _link_s(start, links))


def _part_s(one: Arriving, links: KnownLinks, costs: StartCosts) -> float:
    """Until the start and others hold all layers between them."""
    start = one.start
    if one.warms:
        return costs.fixed_s + start.version.image_bytes / costs.copy_bytes_per_s / one.warms
    if start.cast is None:
        return inf
    return costs.fixed_s + forecast(start.cast).pipeline * _link_s(start, links)


def _link_s(start: StartOn, links: KnownLinks) -> float:
    """Of one copy over the slowest link of the cast, whose pace all keep, or over the node's own."""
    cast = start.cast
    names = [start.node] if cast is None else [member.node for member in cast.members[: cast.planned]]
    rates = [links.rates[name] for name in names if name in links.rates]
    return start.version.image_bytes / min(rates, default=_LINK_BYTES_PER_S)


def _is_warm(start: StartOn, nodes: Mapping[str, NodeRecord]) -> bool:
    """Whether the image is in its own host's memory."""
    node = nodes.get(start.node)
    hosts = {one.host for one in nodes.values() if _holds(one, start.version.image)}
    return start.cast is None and node is not None and node.host in hosts


def _holds(node: NodeRecord, image: str | None) -> bool:
    return any(one.image == image and Tier.HOST in one.tiers for one in node.holdings)


def _in_cast(cast: CastRecord | None, node: str) -> tuple[int, int] | None:
    """Of the cast's sub-groups, which begin with chunks of their own: which one, and how many there are.
    None where the node is in none."""
    if cast is None:
        return None
    names = [member.node for member in cast.members[: cast.planned]]
    groups = subgroups(CastShape(nodes=cast.planned, sources=cast.sources, blocks=1))
    busy = [group for group in groups if len(group) > 1]
    for number, group in enumerate(busy):
        if node in {names[member] for member in group}:
            return number, len(busy)
    return None
