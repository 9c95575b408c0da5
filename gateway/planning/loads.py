"""The load of function versions as input of the scaling policy. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.outlook import LoadOutlook
from gateway.planning.plan import PendingStart, VersionDemand
from gateway.planning.policy import FunctionLoad, PolicyState
from registry.records.function import Function, Scaling, ScalingMode
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.live import InstanceRole


def function_loads(
    state_cache: ClusterStateCache,
    demands: Mapping[VersionKey, VersionDemand],
    pending: Mapping[str, PendingStart],
    stopping: Collection[str],
    outlook: LoadOutlook,
    paused: Collection[str] = (),
    states: Mapping[VersionKey, PolicyState] | None = None,
) -> dict[VersionKey, FunctionLoad]:
    """Return the load of each current version and candidate, and of others with calls or instances.

    `pending` are requested starts without a record, by instance. The `outlook` has begun this step.
    `paused` ones get no calls, and can be used again at once. `states` are those of the last decisions.
    """
    nodes = outlook.nodes
    waiting: dict[VersionKey, list[str]] = {}
    for instance_id, start in pending.items():
        if start.counts:
            waiting.setdefault(start.key, []).append(instance_id)
    keys = {*state_cache.instance_keys(), *waiting, *(key for key, demand in demands.items() if demand.held)}
    keys.update(VersionKey(f.name, f.current) for f in state_cache.functions.values())
    keys.update(VersionKey(name, one.plan.candidate) for name, one in state_cache.rollouts.items())
    loads = {}
    for key in keys:
        head = state_cache.functions.get(key.function)
        if head is None:
            continue
        scaling = _scaling(head, key.version)
        demand = demands.get(key, VersionDemand())
        coming = [i for i in state_cache.starting(key) if i.instance_id not in stopping]
        ready = [i for i in state_cache.ready(key) if i.instance_id not in stopping]
        requested = waiting.get(key, ())
        roles = state_cache.live.roles(key.function, key.version)
        load = FunctionLoad(
            in_flight=demand.in_flight,
            held=demand.held,
            ready=len(ready),
            starting=len(requested) + len(coming),
            nodes=nodes,
            scaling=scaling,
            tokens=demand.tokens,
            prefilling=sum(roles.get(i.instance_id) is InstanceRole.PREFILL for i in ready),
        )
        if scaling.policy is ScalingMode.LOAD and (demand.calls or load.live):
            version = state_cache.version(key)
            known = state_cache.instances(key)
            taken = [*(i.node for i in known), *(pending[id_].node for id_ in requested)]
            resumable = len(can_resume((i for i in known if i.instance_id in paused), state_cache))
            trend = states[key].trend if states and key in states else None
            load = replace(
                load,
                last_need=None if trend is None else trend.last_need,
                capacity=outlook.capacity(key, ready),
                starts=replace(outlook.starts(version, taken), paused=resumable),
                starting_s=outlook.remaining_s(version, coming, requested),
            )
        loads[key] = load
    return loads


def _scaling(head: Function, version: int) -> Scaling:
    """Return the settings of a version: its function's, with a minimum only where requests go to it."""
    if version == head.current:
        return head.scaling
    return head.candidate_scaling if version == head.candidate else replace(head.scaling, min_instances=0)


def can_resume(paused: Iterable[InstanceRecord], state_cache: ClusterStateCache) -> list[InstanceRecord]:
    """Return the paused instances that calls can go to again."""
    return [
        one
        for one in paused
        if one.state is InstanceState.READY
        and (entry := state_cache.node(one.node)) is not None
        and entry.usable
    ]
