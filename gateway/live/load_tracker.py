"""The loads of all versions and the decision on each, made again as queues, instances and loads change."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from gateway.cluster.link_estimates import LinkEstimates, estimate_links
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.live.forecast import (
    ModelLoad,
    OpeningTimes,
    QueuedWork,
    StartCosts,
    model_loads,
    predict,
    start_costs,
)
from gateway.live.policy import LiveDecision, LiveForecast, decide_live
from gateway.planning.actions import StartAction
from gateway.planning.plan import VersionDemand
from gateway.planning.work import InstanceCapacity, queue_wait_s
from registry.records.instance import InstanceState
from registry.records.live import LiveMode


class LoadTracker:
    """The loads under way, by version and instance, each from its plan until it is ready or has failed.

    A version's decision lasts as long as any of its loads.
    """

    def __init__(self, state_cache: ClusterStateCache) -> None:
        self._state_cache = state_cache
        self._loads: dict[VersionKey, dict[str, ModelLoad]] = {}
        self._decisions: dict[VersionKey, LiveDecision] = {}
        self.openings = OpeningTimes()

    def __repr__(self) -> str:
        loads = {str(key): list(loads) for key, loads in self._loads.items()}
        return f"<LoadTracker {loads} {list(map(str, self._decisions.values()))}>"

    @property
    def keys(self) -> list[VersionKey]:
        """The versions that load."""
        return list(self._loads)

    def loads(self, key: VersionKey) -> list[ModelLoad]:
        return list(self._loads.get(key, {}).values())

    def get(self, start: StartAction) -> ModelLoad | None:
        return self._loads.get(start.key, {}).get(start.instance_id)

    def add(self, starts: Sequence[StartAction]) -> None:
        """Add starts of one version that are made together."""
        nodes = {node.id: node for node in self._state_cache.usable_nodes()}
        loads = self._loads.setdefault(starts[0].key, {})
        offsets = [load.offset for load in loads.values() if load.offset is not None]
        loads |= {load.start.instance_id: load for load in model_loads(starts, nodes, offsets)}

    def update(self, start: StartAction, **changes: Any) -> ModelLoad | None:
        """Replace fields of a load; None where it is not known any more."""
        load = self.get(start)
        if load is not None:
            load = self._loads[start.key][start.instance_id] = replace(load, **changes)
        return load

    def remove(self, start: StartAction) -> None:
        loads = self._loads.get(start.key, {})
        loads.pop(start.instance_id, None)
        if not loads:
            self._loads.pop(start.key, None)
            self._decisions.pop(start.key, None)

    def clear(self) -> None:
        self._loads.clear()
        self._decisions.clear()

    # --- decisions

    def decision(self, key: VersionKey) -> LiveDecision | None:
        """Return the last decision on a version that loads."""
        return self._decisions.get(key)

    def recover(self, key: VersionKey, decision: LiveDecision) -> None:
        """Continue with the decision of an earlier controller, unless there is one."""
        self._decisions.setdefault(key, decision)

    def setting(self, key: VersionKey) -> LiveMode:
        head = self._state_cache.functions.get(key.function)
        return LiveMode.OFF if head is None else head.scaling.live

    def decide(
        self, key: VersionKey, demand: VersionDemand, capacity: InstanceCapacity, facts: "ClusterFacts"
    ) -> LiveDecision:
        """Decide on a version that loads; `capacity` is that by which the scaling policy has decided.

        Nothing is predicted where the decision is known without it.
        """
        head, before = self._state_cache.functions.get(key.function), self._decisions.get(key)
        if head is None:  # it was deleted: its starts are about to be stopped
            decision = before or LiveDecision(way=LiveMode.OFF, reason="the function was deleted")
        elif before is not None and before.is_live and head.scaling.live is not LiveMode.OFF:
            decision = before
        else:
            forecast = self._forecast(key, demand, capacity, facts)
            decision = decide_live(head.scaling.live, forecast, head.scaling.ttft_target_s, before)
        self._decisions[key] = decision
        return decision

    def _forecast(
        self, key: VersionKey, demand: VersionDemand, capacity: InstanceCapacity, facts: "ClusterFacts"
    ) -> LiveForecast:
        ready = self._state_cache.ready(key)
        if ready and not demand.held and self._decisions.get(key) is not None:
            return LiveForecast(plain_s=0.0)  # a call would find a free slot
        slots = min((one.max_concurrency for one in ready), default=0)
        queue = QueuedWork(
            calls=demand.held,
            tokens=demand.tokens.waiting,
            tokens_per_s=capacity.prefill_tokens_s,
            ready=len(ready),
            ready_only_s=queue_wait_s(
                demand.tokens,
                replace(capacity, slots=slots),
                queued=demand.held,
                running=demand.in_flight,
                ready=len(ready),
            ),
        )
        return predict(self.loads(key), facts.links, facts.costs, self.openings, queue)


class ClusterFacts:
    """What predictions need of the whole cluster, computed once per step of the controller if at all."""

    def __init__(self, state_cache: ClusterStateCache) -> None:
        self._state_cache = state_cache

    @cached_property
    def links(self) -> LinkEstimates:
        return estimate_links(list(self._state_cache.usable_nodes()), self._state_cache.link_rates)

    @cached_property
    def costs(self) -> StartCosts:
        ready = [one for one in self._state_cache.instances() if one.state is InstanceState.READY]
        nbytes: Mapping[tuple[str, int], int] = {
            (one.function, one.version): one.image_bytes for one in self._state_cache.versions()
        }
        return start_costs(ready, nbytes)
