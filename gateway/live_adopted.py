"""Pipelines of an earlier controller: what is to be done about them, by their members' records (pure).

Who takes them over hears nothing of what their members hold; it lets them serve until these serve alone.
"""

from gateway.directory import Directory
from gateway.live_group import Close, Switch, Todo
from registry.instance import InstanceState
from registry.live import LivePipeline, LiveSwitch

_SERVE = frozenset({InstanceState.LOADING, InstanceState.READY})


def todos(pipeline: LivePipeline, directory: Directory) -> tuple[Todo, ...]:
    """What follows from how the members are now."""
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
