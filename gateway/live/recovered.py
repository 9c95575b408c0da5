"""Recovery of the pipelines and starts of an earlier controller (pure).

A new controller receives no layer reports of recovered pipelines; they serve until their members are ready.
Starts that are in no pipeline are requested again: their nodes let the new controller join and report layers.
"""

from collections.abc import Collection, Iterator

from gateway.cluster.state_cache import ClusterStateCache
from gateway.live.group import ClosePipeline, LiveGroupAction, PromoteMember
from gateway.live.model_layers import is_layered
from gateway.live.policy import LiveDecision, decision_of
from gateway.planning.actions import StartAction
from registry.records.instance import InstanceState
from registry.records.live import LiveMode, LivePipeline, LiveSwitch

_SERVE = frozenset({InstanceState.LOADING, InstanceState.READY})


def recovered_actions(pipeline: LivePipeline, state_cache: ClusterStateCache) -> tuple[LiveGroupAction, ...]:
    """Return the actions that follow from the state of the members."""
    if pipeline.is_pair:
        return _pair_actions(pipeline, state_cache)
    switched = {one.instance_id for one in pipeline.switched}
    new: list[LiveGroupAction] = []
    for stage in pipeline.stages:
        instance = state_cache.instance(stage.instance_id)
        if instance is None or instance.state not in _SERVE:
            return (ClosePipeline(pipeline_id=pipeline.pipeline_id, reason=f"{stage.node} is lost"),)
        if instance.state is InstanceState.READY and stage.instance_id not in switched:
            sharers = len(pipeline.stages) - len(switched)
            switched.add(stage.instance_id)
            switch = LiveSwitch(instance_id=stage.instance_id, sharers=sharers)
            reason = f"{stage.node} holds all layers"
            new.append(PromoteMember(pipeline_id=pipeline.pipeline_id, switch=switch, reason=reason))
    if len(switched) == len(pipeline.stages):
        new.append(ClosePipeline(pipeline_id=pipeline.pipeline_id, reason="all its nodes hold all layers"))
    return tuple(new)


def _pair_actions(pair: LivePipeline, state_cache: ClusterStateCache) -> tuple[LiveGroupAction, ...]:
    wanted = (InstanceState.LOADING, InstanceState.READY)
    for stage, state in zip(pair.stages, wanted, strict=False):
        instance = state_cache.instance(stage.instance_id)
        if instance is None or instance.state is not state:
            reason = f"{stage.node} {'is lost' if instance is None else f'is {instance.state}'}"
            return (ClosePipeline(pipeline_id=pair.pipeline_id, reason=reason),)
    return ()


def unclaimed_starts(
    state_cache: ClusterStateCache, known: Collection[str]
) -> Iterator[tuple[LiveDecision, StartAction]]:
    """Yield starts of an earlier controller that can serve live, with the last decision on their version.

    Starts of pipeline members and those in `known` are left out.
    """
    for key in state_cache.instance_keys():
        head, version = state_cache.functions.get(key.function), state_cache.version(key)
        if head is None or version is None or head.scaling.live is LiveMode.OFF or not is_layered(version):
            continue
        record = state_cache.live.record(key.function, key.version)
        decision = LiveDecision(way=LiveMode.OFF, reason="") if record is None else decision_of(record)
        pipelines = () if record is None else record.pipelines
        members = {stage.instance_id for pipeline in pipelines for stage in pipeline.stages}
        for instance in state_cache.starting(key):
            is_known = instance.instance_id in members or instance.instance_id in known
            if not is_known and instance.group is None:
                start = StartAction(
                    instance_id=instance.instance_id,
                    version=version,
                    node=instance.node,
                    holders=(),
                    max_concurrency=instance.max_concurrency,
                    live=True,
                )
                yield decision, start
