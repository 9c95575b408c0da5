"""Replicas that calls are sent to: ready instances, and pipelines of nodes that are still loading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from registry.records.instance import StartKind
from registry.records.live import LivePipeline, LiveStage

_SHARED = 0.5  # share of a node's time where it serves alone and runs a stage


class Replica(Protocol):
    """A target of calls; InstanceRecord is one.

    `instance_id` is unique among all replicas, calls are sent to `node`, and `max_concurrency` is the number
    of concurrent calls, 0 if unknown.
    """

    @property
    def instance_id(self) -> str: ...

    @property
    def node(self) -> str: ...

    @property
    def max_concurrency(self) -> int: ...

    @property
    def start_kind(self) -> StartKind: ...

    @property
    def phases_ms(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReplica:
    """A pipeline as a replica; `node` is that of its last stage, which runs it."""

    pipeline: LivePipeline
    instance_id: str
    node: str
    max_concurrency: int
    start_kind: StartKind = StartKind.LIVE
    phases_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def head(self) -> LiveStage:
        return self.pipeline.stages[self.pipeline.head]

    @property
    def others(self) -> tuple[LiveStage, ...]:
        """The stages other than the last one."""
        return tuple(stage for stage in self.pipeline.stages if stage is not self.head)

    @property
    def runs_in_turns(self) -> bool:
        """Whether each token passes all stages, which it does not in a pair."""
        return not self.pipeline.is_pair


def pipeline_replica(pipeline: LivePipeline) -> PipelineReplica:
    """Return the pipeline as a replica."""
    return PipelineReplica(
        pipeline=pipeline,
        instance_id=pipeline.name,
        node=pipeline.stages[pipeline.head].node,
        max_concurrency=pipeline.slots,
    )


def slots_key_of(replica: Replica) -> str:
    """Return the key under which calls on the replica are counted.

    Calls of a single loading node count for its instance, which continues them when it is ready.
    """
    if isinstance(replica, PipelineReplica) and replica.pipeline.is_alone:
        return replica.head.instance_id
    return replica.instance_id


def serving_rates(replicas: Sequence[Replica]) -> list[float]:
    """Return the throughput of each replica, in whole nodes; an instance that is a stage too has less."""
    pipelines = [replica.pipeline for replica in replicas if isinstance(replica, PipelineReplica)]
    both = {one.instance_id for pipeline in pipelines for one in pipeline.switched}
    return [
        replica.pipeline.rate
        if isinstance(replica, PipelineReplica)
        else (_SHARED if replica.instance_id in both else 1.0)
        for replica in replicas
    ]
