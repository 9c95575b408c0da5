"""The pipelines that the targets of a plan would form, as the gateway decides from what they hold."""

from dataclasses import dataclass

import numpy as np

from gateway.live.actions import Create, LayersReported, LoadStarted, Promote, Reconfigure
from gateway.live.assembler import PipelineAssembler
from gateway.live.model_layers import even_layers
from rdmacast.bitfield import to_bits
from rdmacast.plan.pipelines import ExecutionPipeline, pipelines
from rdmacast.plan.plan import TransferPlan

_MAX_TRANSFERS = 1 << 12  # a decision after each takes up to a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """The pipelines that serve at the end, the earliest first; `first_step` is when the first one formed.

    Each target is in one pipeline; one that never joined another has its own, from when it holds all.
    """

    pipelines: tuple[ExecutionPipeline, ...]
    first_step: int | None


def foresee(plan: TransferPlan) -> Foreseen:
    """Return the pipelines of a plan, each block as a layer; large plans by sub-groups (Algorithm 2)."""
    if not plan.shape.targets:
        return Foreseen(pipelines=(), first_step=None)
    if len(plan.transfers) > _MAX_TRANSFERS:
        formed = pipelines(plan)
        return Foreseen(pipelines=formed, first_step=formed[0].ready_step)
    return _decided(plan)


def _decided(plan: TransferPlan) -> Foreseen:
    arrived = plan.arrivals()
    groups = {node: number for number, group in enumerate(plan.groups) for node in group}
    decisions = PipelineAssembler(even_layers(plan.shape.blocks))
    decisions.apply(LoadStarted(node=str(node), group=groups[node]) for node in plan.shape.targets)
    formed: dict[int, ExecutionPipeline] = {}
    alone: dict[int, int] = {}
    first: int | None = None
    for step in range(1, plan.steps + 1):
        now = [node for node in plan.shape.targets if (arrived[node] == step).any()]
        actions = decisions.apply(
            LayersReported(node=str(node), blocks=to_bits(np.flatnonzero(arrived[node] <= step).tolist()))
            for node in now
        )
        for action in actions:
            if isinstance(action, Create | Reconfigure):
                stages = action.pipeline.stages
                formed[action.pipeline.number] = ExecutionPipeline(
                    nodes=tuple(int(stage.node) for stage in stages),
                    chunks=tuple((stage.first, stage.last) for stage in stages),
                    ready_step=step,
                )
            elif isinstance(action, Promote):
                alone[int(action.node)] = step
            else:
                continue
            first = step if first is None else first
    together = {node for pipeline in formed.values() for node in pipeline.nodes}
    single = [
        ExecutionPipeline(nodes=(node,), chunks=((0, plan.shape.blocks),), ready_step=step)
        for node, step in alone.items()
        if node not in together
    ]
    by_step = sorted((*formed.values(), *single), key=lambda pipeline: pipeline.ready_step)
    return Foreseen(pipelines=tuple(by_step), first_step=first)
