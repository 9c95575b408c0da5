"""What an earlier controller left: its pipelines and its starts (pure).

Who takes a pipeline over hears nothing of what its members hold; it lets it serve until these serve alone.
Starts that are in no pipeline are asked for again: their nodes let it join, and tell what they hold.
"""

from collections.abc import Collection, Iterator

from gateway.actions import StartOn
from gateway.directory import Directory, VersionKey
from gateway.live_group import Close, Switch, Todo
from registry.instance import InstanceState
from registry.live import Live, LivePipeline, LiveSwitch

_SERVE = frozenset({InstanceState.LOADING, InstanceState.READY})


def todos(pipeline: LivePipeline, directory: Directory) -> tuple[Todo, ...]:
    """What follows from how the members are now."""
    if pipeline.way is Live.ZIGZAG:
        return _todos_of_pair(pipeline, directory)
    switched = {one.instance_id for one in pipeline.switched}
    new: list[Todo] = []
    for stage in pipeline.stages:
        instance = directory.instance(stage.instance_id)
        if instance is None or instance.state not in _SERVE:
            return (Close(pipeline_id=pipeline.pipeline_id, reason=f"{stage.node} is gone"),)
        if instance.state is InstanceState.READY and stage.instance_id not in switched:
            sharers = len(pipeline.stages) - len(switched)
            switched.add(stage.instance_id)
            switch = LiveSwitch(instance_id=stage.instance_id, sharers=sharers)
            reason = f"{stage.node} holds all layers"
            new.append(Switch(pipeline_id=pipeline.pipeline_id, switch=switch, reason=reason))
    if len(switched) == len(pipeline.stages):
        new.append(Close(pipeline_id=pipeline.pipeline_id, reason="all its nodes hold all layers"))
    return tuple(new)


def _todos_of_pair(pair: LivePipeline, directory: Directory) -> tuple[Todo, ...]:
    wanted = (InstanceState.LOADING, InstanceState.READY)
    for stage, state in zip(pair.stages, wanted, strict=True):
        instance = directory.instance(stage.instance_id)
        if instance is None or instance.state is not state:
            reason = f"{stage.node} {'is gone' if instance is None else f'is {instance.state}'}"
            return (Close(pipeline_id=pair.pipeline_id, reason=reason),)
    return ()


def strangers(directory: Directory, begun: Collection[str]) -> Iterator[tuple[Live, StartOn]]:
    """The live starts under way, besides those `begun` here, that are in no pipeline, and what for."""
    for record in directory.live:
        key = VersionKey(record.function, record.version)
        version = directory.version(key)
        if record.way is Live.OFF or version is None:
            continue
        members = {stage.instance_id for pipeline in record.pipelines for stage in pipeline.stages}
        for instance in directory.coming(key):
            if instance.instance_id not in members and instance.instance_id not in begun:
                start = StartOn(
                    instance_id=instance.instance_id,
                    version=version,
                    node=instance.node,
                    holders=(),
                    max_concurrency=instance.max_concurrency,
                    live=True,
                )
                yield record.way, start
