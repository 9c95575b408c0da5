"""What the load target has to go by: seen capacities, and when instances would be ready. No I/O."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import msgspec

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.recent import RecentAverages
from gateway.planning.work import UNSEEN, InstanceCapacity, StartForecast
from registry.messages.node import InstanceLoad
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceRecord, StartKind
from registry.records.node import NodeRecord, Tier

_HOST_BYTES_PER_S = 4e9  # from host to device memory, where no start was seen
_FIXED_S = 0.1  # of a start, where none was seen
_LATE = 0.1  # part of its expected time that a late start is still expected to take
_MAX_KEPT = 4096
# What a node reports is taken within these bounds only.
_RATES = (1e-3, 1e9)  # prompt tokens per second
_STEPS_S = (1e-7, 3600.0)
_MAX_START_S = 86400.0
_MAX_TOKENS = 1 << 40


class CapacityTable:
    """The loads of instances by node, and what instances of each version were last seen to do."""

    def __init__(self) -> None:
        self._by_node: dict[str, tuple[InstanceLoad, ...]] = {}
        self._last: dict[VersionKey, InstanceCapacity] = {}  # the oldest first
        self._groups: dict[VersionKey, list[InstanceLoad]] = {}  # from which the last ones were computed

    def __repr__(self) -> str:
        return f"<CapacityTable of {len(self._by_node)} nodes, {len(self._last)} versions>"

    def put(self, node: str, loads: Iterable[InstanceLoad]) -> None:
        """Replace the loads of a node's instances; none if it reports no more.

        What cannot be is as if it were not seen.
        """
        if loads := tuple(map(_plausible, loads)):
            self._by_node[node] = loads
        else:
            self._by_node.pop(node, None)

    def kv_usage(self, instance: Callable[[str], InstanceRecord | None]) -> dict[str, float]:
        """Return which share of their KV caches the instances of each function use; `instance` as below."""
        used: Counter[str] = Counter()
        whole: Counter[str] = Counter()
        for node, reported in self._by_node.items():
            for load in reported:
                record = instance(load.instance_id)
                if record is not None and record.node == node:
                    used[record.function] += load.kv_used_tokens
                    whole[record.function] += load.kv_tokens
        return {name: used[name] / tokens for name, tokens in whole.items() if tokens}

    def clear(self) -> None:
        """Drop the loads, but not what is known of versions."""
        self._by_node.clear()

    def capacities(
        self, instance: Callable[[str], InstanceRecord | None]
    ) -> dict[VersionKey, InstanceCapacity]:
        """Return the capacity of an instance of each version with ready ones, or that had such before.

        `instance` returns the record of an instance: a node's reports on those of others do not count.
        """
        loads: dict[VersionKey, list[InstanceLoad]] = defaultdict(list)
        for node, reported in self._by_node.items():
            for load in reported:
                record = instance(load.instance_id)
                if record is not None and record.node == node:
                    loads[VersionKey(record.function, record.version)].append(load)
        for key in self._groups.keys() - loads.keys():
            if key in self._last:
                self._last[key] = replace(self._last[key], kv_used_tokens=0)
        for key, group in loads.items():
            last = self._last.pop(key, UNSEEN)
            self._last[key] = last if self._groups.get(key) == group else _capacity(group, last)
        self._groups, found = loads, dict(self._last)
        while len(self._last) > _MAX_KEPT:
            del self._last[next(iter(self._last))]
        return found


def _plausible(load: InstanceLoad) -> InstanceLoad:
    """Return the load without numbers that cannot be."""
    rate, kv_tokens = load.prefill_tokens_s, min(max(0, load.kv_tokens), _MAX_TOKENS)
    return msgspec.structs.replace(
        load,
        prefill_tokens_s=rate if _RATES[0] <= rate <= _RATES[1] else 0.0,
        decode_steps=tuple(
            (count, seconds)
            for count, seconds in load.decode_steps
            if 0 < count < _MAX_TOKENS and _STEPS_S[0] <= seconds <= _STEPS_S[1]
        ),
        kv_tokens=kv_tokens,
        kv_used_tokens=min(max(0, load.kv_used_tokens), kv_tokens),
    )


def _capacity(loads: Iterable[InstanceLoad], before: InstanceCapacity) -> InstanceCapacity:
    """Return the usual capacity of these instances; what none was seen to do is as it was before.

    An instance that shares its node has a smaller KV cache. The mean counts, so that all have their sum.
    """
    loads = list(loads)
    rates = [load.prefill_tokens_s for load in loads if load.prefill_tokens_s]
    caches = [load.kv_tokens for load in loads if load.kv_tokens]
    by_size: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for load in loads:
        for count, seconds in load.decode_steps:
            by_size[max(0, count - 1).bit_length()].append((count, seconds))
    steps = sorted(sorted(seen)[len(seen) // 2] for seen in by_size.values())
    return replace(
        before,
        prefill_tokens_s=median_low(rates) if rates else before.prefill_tokens_s,
        decode_steps=tuple(steps) or before.decode_steps,
        kv_tokens=sum(caches) // len(caches) if caches else before.kv_tokens,
        kv_used_tokens=sum(load.kv_used_tokens for load in loads),
    )


class StartTimes:
    """How long starts take: the average of those seen by version and kind, else by bytes and rates."""

    def __init__(self) -> None:
        self._seen = RecentAverages[tuple[VersionKey, StartKind]]()

    def __repr__(self) -> str:
        return f"<StartTimes {self._seen}>"

    def on_ready(self, record: InstanceRecord) -> None:
        """Add the start of an instance that is ready; of a group that of its leader, which waits for all."""
        if not record.takes_calls:
            return
        key = VersionKey(record.function, record.version), record.start_kind
        took_s = sum(record.phases_ms.values()) / 1e3
        if 0 < took_s <= _MAX_START_S:
            self._seen.add(key, took_s)

    def expected_s(self, version: FunctionVersion, kind: StartKind, link_bytes_s: float) -> float:
        """Return how long such a start takes."""
        seen = self._seen.get((VersionKey(version.function, version.version), kind))
        if seen is not None:
            return seen
        rates = {StartKind.WARM: _HOST_BYTES_PER_S, StartKind.COLD: min(link_bytes_s, _HOST_BYTES_PER_S)}
        rate = rates.get(kind)
        return _FIXED_S + (version.image_bytes / rate if rate else 0.0)


class LoadOutlook:
    """The capacities and start times of one controller; `begin` prepares it for a planning step."""

    def __init__(self) -> None:
        self.capacities = CapacityTable()
        self.times = StartTimes()
        self._since: dict[str, float] = {}  # when each start in progress was first seen here
        self._now = 0.0
        self._of_version: Mapping[VersionKey, InstanceCapacity] = {}
        self._holders: dict[tuple[str, Tier], set[str]] | None = None
        self._nodes: list[NodeRecord] = []
        self.nodes = 0  # usable ones
        self._link_bytes_s = 0.0

    def __repr__(self) -> str:
        return f"<LoadOutlook {self.capacities!r} {self.times!r}>"

    def begin(self, state_cache: ClusterStateCache, now: float) -> None:
        """Prepare for a step at `now`."""
        self._now, self._nodes, self._holders = now, list(state_cache.usable_nodes()), None
        self.nodes = len(self._nodes)
        self._of_version = self.capacities.capacities(state_cache.instance)
        self._link_bytes_s = state_cache.link_rates.usual_bytes_per_s()

    def capacity(self, key: VersionKey, ready: Sequence[InstanceRecord]) -> InstanceCapacity:
        """Return the capacity of an instance of the version."""
        slots = min((one.max_concurrency for one in ready if one.max_concurrency), default=0)
        seen = self._of_version.get(key, UNSEEN)
        kv_tokens = seen.kv_tokens or min((one.kv_tokens for one in ready if one.kv_tokens), default=0)
        return replace(seen, slots=slots, kv_tokens=kv_tokens)

    def starts(self, version: FunctionVersion | None, taken: Iterable[str]) -> StartForecast:
        """Forecast further starts of the version, beside the nodes `taken` by its instances."""
        if version is None:
            return StartForecast()
        hot, warm = (self._held(version.image, tier) - set(taken) for tier in (Tier.GPU, Tier.HOST))
        hot_s, warm_s, cold_s = (
            self.times.expected_s(version, kind, self._link_bytes_s)
            for kind in (StartKind.HOT, StartKind.WARM, StartKind.COLD)
        )
        warm_s = max(hot_s, warm_s)
        return StartForecast(
            hot=len(hot), hot_s=hot_s, warm=len(warm - hot), warm_s=warm_s, cold_s=max(warm_s, cold_s)
        )

    def remaining_s(
        self, version: FunctionVersion | None, starting: Iterable[InstanceRecord], pending: Iterable[str]
    ) -> tuple[float, ...]:
        """Return in how many seconds each start in progress is expected to be ready."""
        found = []
        kinds = {one.instance_id: one.start_kind for one in starting}
        for instance_id in (*kinds, *pending):
            since = self._since.setdefault(instance_id, self._now)
            kind = kinds.get(instance_id, StartKind.WARM)
            whole_s = 1.0 if version is None else self.times.expected_s(version, kind, self._link_bytes_s)
            found.append(max(whole_s - (self._now - since), _LATE * whole_s))
        return tuple(found)

    def forget_starts(self, in_progress: Iterable[str]) -> None:
        """Forget all starts but those in progress."""
        kept = set(in_progress)
        for instance_id in [one for one in self._since if one not in kept]:
            del self._since[instance_id]

    def _held(self, image: str | None, tier: Tier) -> set[str]:
        if image is None:
            return set()
        if self._holders is None:
            self._holders = defaultdict(set)
            for node in self._nodes:
                for holding in node.holdings:
                    for one in holding.tiers:
                        self._holders[holding.image, one].add(node.id)
        return self._holders.get((image, tier), set())
