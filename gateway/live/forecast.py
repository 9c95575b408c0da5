"""Predicted waits of a version's calls while it loads (pure).

Loads are predicted from measured link rates, the plans of their casts, earlier starts and their own progress;
how long the queued prompts take then by the rate that the scaling policy uses.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import or_
from statistics import median_low
from typing import NamedTuple

from gateway.cluster.link_estimates import LinkEstimates
from gateway.live.assembler import AssemblerSettings
from gateway.live.load_orders import layer_at, warm_places
from gateway.live.model_layers import ModelLayers
from gateway.live.pairs import ADMIT
from gateway.live.policy import LiveForecast
from gateway.planning.actions import StartAction
from gateway.planning.cast_forecast import forecast
from gateway.planning.recent import RecentAverages
from gateway.planning.work import finish_s
from rdmacast.link_rate import LinkRate
from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.subgroups import subgroups
from registry.records.cast import CastRecord
from registry.records.instance import InstanceRecord, StartKind
from registry.records.live import LiveMode
from registry.records.node import NodeRecord, Tier

_HOST_BYTES_PER_S = 4e9  # from host to device memory, where it was never measured
_FIXED = ("reserve", "bind", "ready")  # the phases of a start that do not depend on the image size
_OPENING_S = 0.1  # of a pipeline or pair, where none was opened yet
_OWN = -1  # and below: groups of nodes that load in no sub-group's order


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """The load of a model by one start.

    `group` identifies the block order in which the image arrives, and `offset` where in the model that order
    begins, as a fraction of its cost (None: unknown). `place` is the node's in its sub-group, the source's is
    0: the last one passes least on. A load from the node's own host memory, whose order can
    be chosen, is one of `warm_loads`; of others that is 0. `single_order`: one host holds the model and sends
    it to all others in one block order. `progress` is the fraction transferred so far, `held` the bitfield of
    complete layers of `layers` (None: not read yet).
    """

    start: StartAction
    group: int
    place: int = 0
    warm_loads: int = 0
    offset: float | None = None
    single_order: bool = False
    progress: float = 0.0
    held: int = 0
    layers: ModelLayers | None = None
    head_first: bool = False


def model_loads(
    starts: Sequence[StartAction], nodes: Mapping[str, NodeRecord], offsets: Collection[float] = ()
) -> tuple[ModelLoad, ...]:
    """Return the loads of starts that are made together, beside loads that began at `offsets`."""
    cold = {start.instance_id: _sub_group(start.cast, start.node) for start in starts}
    parts = {found.number / found.groups for found in filter(None, cold.values())}
    warm = [start.instance_id for start in starts if _is_warm(start, nodes)]
    holding = {node.host for start in starts for node in nodes.values() if _holds(node, start.version.image)}
    places = warm_places(len(warm), {*offsets, *parts}, casts=max(1, len(holding)))
    own = dict(zip(warm, places, strict=True))
    one_order = all(found.groups == 1 for found in filter(None, cold.values()))
    single_order = len(holding) == 1 and len(warm) <= 1 and one_order
    found = []
    for number, start in enumerate(starts):
        of_cast = cold[start.instance_id]
        if of_cast is not None:
            offset = of_cast.number / of_cast.groups
            found.append(ModelLoad(start=start, group=of_cast.number, place=of_cast.place, offset=offset))
        elif start.instance_id in own:
            offset = own[start.instance_id]
            found.append(ModelLoad(start=start, group=_OWN - number, warm_loads=len(warm), offset=offset))
        else:
            found.append(ModelLoad(start=start, group=_OWN - number))
    return tuple(replace(load, single_order=single_order) for load in found)


def first_layer(load: ModelLoad, layers: ModelLayers) -> int:
    """Return the layer at which the load starts, so that all loads can form a pipeline early."""
    return layer_at(layers, load.offset) if load.warm_loads and load.offset is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCosts:
    """The measured costs of starts: the copy rate from host to device memory, and the fixed seconds.

    `basis` states in a few words how they are known.
    """

    copy_bytes_per_s: float = _HOST_BYTES_PER_S
    fixed_s: float = 0.0
    basis: str = f"{_HOST_BYTES_PER_S / 1e9:g} GB/s from host memory assumed"


def start_costs(ready: Iterable[InstanceRecord], nbytes: Mapping[tuple[str, int], int]) -> StartCosts:
    """Return the median costs of the instances that are ready; `nbytes` by function and version.

    Only warm starts show the copy rate: in others the copy waits for the transfer.
    """
    measured = [one for one in ready if one.phases_ms]
    if not measured:
        return StartCosts()
    fixed_s = median_low([sum(one.phases_ms.get(phase, 0.0) for phase in _FIXED) / 1e3 for one in measured])
    rates = [
        nbytes[one.function, one.version] / copy_ms * 1e3
        for one in measured
        if one.start_kind is StartKind.WARM
        and (copy_ms := one.phases_ms.get("copy", 0.0)) > 0
        and nbytes.get((one.function, one.version))
    ]
    if not rates:
        return StartCosts(fixed_s=fixed_s)
    rate = median_low(rates)
    starts = "1 start" if len(rates) == 1 else f"{len(rates)} starts"
    basis = f"{rate / 1e9:.3g} GB/s from host memory as measured in {starts}"
    return StartCosts(copy_bytes_per_s=rate, fixed_s=fixed_s, basis=basis)


class OpeningTimes:
    """How long pipelines and pairs took to open: the average by mode, of which the latest counts most."""

    def __init__(self) -> None:
        self._seen = RecentAverages[LiveMode]()

    def __repr__(self) -> str:
        return f"<OpeningTimes {self._seen}>"

    def on_opening_ended(self, mode: LiveMode, took_s: float) -> None:
        """Add an opening that succeeded, or that was closed so long after it began."""
        self._seen.add(mode, took_s)

    def expected_s(self, mode: LiveMode) -> float:
        seen_s = self._seen.get(mode)
        return _OPENING_S if seen_s is None else seen_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedWork:
    """The queued `calls` of a version, and how fast its instances run them.

    `tokens` are the prompt tokens that wait, `tokens_per_s` is the rate of an instance (0: unknown). The
    `ready` instances alone would have run them in `ready_only_s`.
    """

    calls: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    ready: int = 0
    ready_only_s: float = inf

    def done_s(self, loading_s: Iterable[float], speed: float = 1.0) -> float:
        """Return when the prompts have been run, with further instances that are ready at these times.

        All run them at the fraction `speed` of their rate.
        """
        own_s = self.tokens / self.tokens_per_s / speed if self.tokens_per_s else 0.0
        # Before that their slots and KV caches are taken.
        from_s = max(0.0, self.ready_only_s - own_s / self.ready) if self.ready else inf
        return finish_s(own_s, 1.0, sorted([*[from_s] * self.ready, *loading_s]))


def predict(
    loads: Sequence[ModelLoad],
    links: LinkEstimates,
    costs: StartCosts,
    openings: OpeningTimes,
    queue: QueuedWork,
) -> LiveForecast:
    """Return when the queued prompts have been run, without live serving and with each of its modes.

    A pipeline is possible once the loads hold all layers between them: by the plan of their cast, or when
    each of k loads from host memory has its kth part. From then on its nodes run prompts as ready ones do,
    but for its hops. In a pair a node runs its share from half of its load on, and alone what has arrived.
    """
    times, several = _load_times(loads, links, costs), len(loads) > 1
    alone = all(load.single_order for load in loads)
    pipeline_s = zigzag_s = inf
    if alone:
        pipeline_s = _alone_s(times, openings.expected_s(LiveMode.PIPELINE), queue)
    elif several:
        open_s = _pipeline_s(loads, links, costs) + openings.expected_s(LiveMode.PIPELINE)
        pipeline_s = _in_pipeline_s(times, open_s, queue)
    if queue.ready or several:
        pairs = queue.ready if queue.calls else 0
        helping_s = times.helping_s(openings.expected_s(LiveMode.ZIGZAG))
        zigzag_s = queue.done_s([*helping_s[:pairs], *times.ends_s[pairs:]])
    warm = any(load.warm_loads for load in loads)
    image_bytes = loads[0].start.version.image_bytes
    return LiveForecast(
        plain_s=queue.done_s(times.ends_s),
        pipeline_s=pipeline_s,
        zigzag_s=zigzag_s,
        queued=queue.calls,
        can_grow=not (several or alone),
        basis=costs.basis if warm else f"{image_bytes / 1e6:.3g} MB, {links.summary}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadTimes:
    """When loads end, and when they hold `pairs.ADMIT` of the layers; each in increasing order."""

    ends_s: Sequence[float]
    halves_s: Sequence[float]

    def helping_s(self, opening_s: float) -> list[float]:
        """Return from when each node runs prompts in a pair, or alone."""
        return [
            min(half_s + opening_s, end_s) for half_s, end_s in zip(self.halves_s, self.ends_s, strict=True)
        ]


def _load_times(loads: Sequence[ModelLoad], links: LinkEstimates, costs: StartCosts) -> _LoadTimes:
    whole = [(load.progress, _transfer_s(load, links, costs)) for load in loads]
    ends_s, halves_s = (
        sorted(costs.fixed_s + max(0.0, part - progress) * transfer_s for progress, transfer_s in whole)
        for part in (1.0, ADMIT)
    )
    return _LoadTimes(ends_s=ends_s, halves_s=halves_s)


def _alone_s(times: _LoadTimes, opening_s: float, queue: QueuedWork) -> float:
    """Return when the prompts have been run if each node runs some while it loads, and replies once ready."""
    return max(queue.done_s(times.helping_s(opening_s)), min(times.ends_s[0], queue.done_s(())))


def _in_pipeline_s(times: _LoadTimes, open_s: float, queue: QueuedWork) -> float:
    """Return when the prompts have been run if the loads form a pipeline at `open_s`.

    Until the loads end its nodes have a fraction of their speed, for its hops. The result is the lower of two
    upper bounds: at that speed throughout, and at full speed from so much later on that as much is done by
    the end of the load.
    """
    speed = 1 / (1 + AssemblerSettings().hop_cost * len(times.ends_s))
    early_s = [min(open_s, end_s) for end_s in times.ends_s]
    later_s = [end_s - speed * (end_s - from_s) for from_s, end_s in zip(early_s, times.ends_s, strict=True)]
    return min(queue.done_s(early_s, speed), queue.done_s(later_s))


def _pipeline_s(loads: Sequence[ModelLoad], links: LinkEstimates, costs: StartCosts) -> float:
    """Return when the loads hold all layers between them."""
    layers = next((load.layers for load in loads if load.layers is not None), None)
    if layers is not None:
        parts = [load.held for load in loads if load.held != layers.all_blocks]  # or almost ready
        if reduce(or_, parts, 0) == layers.all_blocks:
            return 0.0
    return min(_part_s(load, links, costs) for load in loads)


def _transfer_s(load: ModelLoad, links: LinkEstimates, costs: StartCosts) -> float:
    """Return the time from the first byte to the last one."""
    start = load.start
    copy_s = start.version.image_bytes / costs.copy_bytes_per_s
    if load.warm_loads:
        return copy_s
    copies = 1.0 if start.cast is None else forecast(start.cast).whole
    return max(copy_s, copies * _link_s(start, links))


def _part_s(load: ModelLoad, links: LinkEstimates, costs: StartCosts) -> float:
    """Return when this load and others like it hold all layers between them."""
    start = load.start
    if load.warm_loads:
        part_s = start.version.image_bytes / costs.copy_bytes_per_s / load.warm_loads
    elif start.cast is not None:
        part_s = forecast(start.cast).pipeline * _link_s(start, links)
    else:
        return inf
    return costs.fixed_s + max(0.0, part_s - load.progress * _transfer_s(load, links, costs))


def _link_s(start: StartAction, links: LinkEstimates) -> float:
    """Return the time of one copy over the slowest link of the cast, or over the node's own."""
    cast = start.cast
    names = [start.node] if cast is None else [member.node for member in cast.members[: cast.planned]]
    rates = [links.rates[name] for name in names if name in links.rates]
    return start.version.image_bytes / min(rates, default=LinkRate().bytes_per_s)


def _is_warm(start: StartAction, nodes: Mapping[str, NodeRecord]) -> bool:
    """Return whether the image is in the memory of the node's own host."""
    node = nodes.get(start.node)
    hosts = {one.host for one in nodes.values() if _holds(one, start.version.image)}
    return start.cast is None and node is not None and node.host in hosts


def _holds(node: NodeRecord, image: str | None) -> bool:
    return any(one.image == image and Tier.HOST in one.tiers for one in node.holdings)


class _SubGroup(NamedTuple):
    """A node's place in its sub-group of a cast, the number of that, and how many there are."""

    place: int
    number: int
    groups: int


def _sub_group(cast: CastRecord | None, node: str) -> _SubGroup | None:
    """Return the node's sub-group of the cast; None where it is in none."""
    if cast is None:
        return None
    names = [member.node for member in cast.members[: cast.planned]]
    groups = subgroups(CastShape(nodes=cast.planned, sources=cast.sources, blocks=1))
    busy = [group for group in groups if len(group) > 1]
    for number, group in enumerate(busy):
        members = [names[member] for member in group]
        if node in members:
            return _SubGroup(members.index(node), number, len(busy))
    return None
