"""Which pipelines a plan's targets would form, as the gateway decides it from what they hold at each step."""

from dataclasses import dataclass

import numpy as np

from gateway.model_layers import even_layers
from gateway.pipeline_actions import Alone, Form, Holds, Loading, Reform
from gateway.pipelines import Pipelines
from rdmacast.have_map import bits_of
from rdmacast.pipelines import ExecutionPipeline, pipelines
from rdmacast.plan import TransferPlan

_MOST_TRANSFERS = 1 << 12  # deciding on each takes up to a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """The pipelines as they serve in the end, the earliest first. Each target is in one; one that never is
    stands by itself, from when it holds everything. `first_step` is when the first one began to serve."""

    pipelines: tuple[ExecutionPipeline, ...]
    first_step: int | None


def foresee(plan: TransferPlan) -> Foreseen:
    """Each block counts as a layer. Large plans are told by their sub-groups alone, as Algorithm 2 has it."""
    if not plan.shape.targets:
        return Foreseen(pipelines=(), first_step=None)
    if len(plan.transfers) > _MOST_TRANSFERS:
        formed = pipelines(plan)
        return Foreseen(pipelines=formed, first_step=formed[0].ready_step)
    return _decided(plan)


def _decided(plan: TransferPlan) -> Foreseen:
    arrived = plan.arrivals()
    groups = {node: number for number, group in enumerate(plan.groups) for node in group}
    decisions = Pipelines(even_layers(plan.shape.blocks))
    decisions.hear(Loading(node=str(node), group=groups[node]) for node in plan.shape.targets)
    formed: dict[int, ExecutionPipeline] = {}
    alone: dict[int, int] = {}
    first: int | None = None
    for step in range(1, plan.steps + 1):
        now = [node for node in plan.shape.targets if (arrived[node] == step).any()]
        actions = decisions.hear(
            Holds(node=str(node), blocks=bits_of(np.flatnonzero(arrived[node] <= step).tolist()))
            for node in now
        )
        for action in actions:
            if isinstance(action, Form | Reform):
                stages = action.pipeline.stages
                formed[action.pipeline.number] = ExecutionPipeline(
                    nodes=tuple(int(stage.node) for stage in stages),
                    chunks=tuple((stage.first, stage.last) for stage in stages),
                    ready_step=step,
                )
            elif isinstance(action, Alone):
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
