"""Nodes, functions, instances and pipelines as watchers see them: what a person looks at, and no more."""

from collections.abc import Mapping, Sequence

import msgspec

from registry.records.function import Function, FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.live import LiveRecord
from registry.records.node import NodeRecord, NodeState


class ShownNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node; memory is in bytes."""

    host: str
    state: str
    device: str
    gpu_type: str
    gpu_bytes: int
    gpu_free_bytes: int
    host_bytes: int
    host_free_bytes: int
    images: int
    leaf: str
    started_at: float


class ShownFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function by its current version."""

    version: int
    versions: int
    task: str
    architecture: str
    engine: str
    image_bytes: int
    owner: str | None
    private: bool
    min_instances: int
    max_instances: int | None
    created_at: float


class ShownInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance. Of a group, the one that takes the calls leads, and has the `nodes` of all members."""

    function: str
    version: int
    node: str
    state: str
    start_kind: str
    since: float
    source: str
    progress: float
    phases_ms: Mapping[str, float]
    error: str
    engine: str
    nodes: Sequence[str]
    leads: bool


class ShownStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a pipeline: the layers `[first, last)`."""

    node: str
    instance: str
    first: int
    last: int


class ShownPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline; calls go to the stage of index `head`."""

    name: str
    way: str
    head: int
    stages: Sequence[ShownStage]


class ShownLive(msgspec.Struct, frozen=True, kw_only=True):
    """How a version serves while it loads, and why."""

    function: str
    version: int
    way: str
    reason: str
    at: float
    pipelines: Sequence[ShownPipeline]
    roles: Mapping[str, str]


def show_node(record: NodeRecord) -> ShownNode:
    """Return the node as it is shown."""
    return ShownNode(
        host=record.host,
        state="cordoned" if record.cordoned and record.state is NodeState.READY else record.state.value,
        device=record.device,
        gpu_type=record.gpu_type,
        gpu_bytes=record.gpu_bytes,
        gpu_free_bytes=record.gpu_free_bytes,
        host_bytes=record.host_bytes,
        host_free_bytes=record.host_free_bytes,
        images=len(record.holdings),
        leaf=record.leaf,
        started_at=record.started_at,
    )


def show_function(found: tuple[Function, FunctionVersion]) -> ShownFunction:
    """Return the function as it is shown."""
    function, current = found
    return ShownFunction(
        version=current.version,
        versions=len(function.versions),
        task=current.task.value,
        architecture=current.architecture,
        engine=current.engine.value,
        image_bytes=current.image_bytes,
        owner=function.access.owner or None,
        private=function.access.private,
        min_instances=function.scaling.min_instances,
        max_instances=function.scaling.max_instances,
        created_at=function.created_at,
    )


def show_instance(record: InstanceRecord) -> ShownInstance:
    """Return the instance as it is shown."""
    return ShownInstance(
        function=record.function,
        version=record.version,
        node=record.node,
        state=record.state.value,
        start_kind=record.start_kind.value,
        since=record.since,
        source=record.source,
        progress=round(record.progress, 3),
        phases_ms={name: round(ms, 1) for name, ms in record.phases_ms.items()},
        error=record.error,
        engine=record.engine.value,
        nodes=() if record.group is None else [member.node for member in record.group.members],
        leads=record.takes_calls,
    )


def show_live(record: LiveRecord) -> ShownLive:
    """Return how a version serves while it loads, as it is shown."""
    pipelines = [
        ShownPipeline(
            name=pipeline.name,
            way=pipeline.way.value,
            head=pipeline.head,
            stages=[
                ShownStage(node=one.node, instance=one.instance_id, first=one.first, last=one.last)
                for one in pipeline.stages
            ],
        )
        for pipeline in record.pipelines
    ]
    return ShownLive(
        function=record.function,
        version=record.version,
        way=record.way.value,
        reason=record.reason,
        at=record.at,
        pipelines=pipelines,
        roles={name: role.value for name, role in record.roles.items()},
    )
