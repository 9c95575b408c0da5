"""Execution pipelines over nodes that still receive the model, and the steps at which they are ready (pure).

After FaaScale's Algorithm 2: a pipeline has one target of each sub-group while several sub-groups have
targets left, else targets of the last one. Each of its nodes executes one range of blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rdmacast.plan.plan import TransferPlan
from rdmacast.plan.planners.subgroups import chunks
from rdmacast.plan.transfers import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPipeline:
    """A pipeline in which `nodes[i]` executes the blocks `[first, last)` of `chunks[i]`, in this order.

    All of them have arrived when step `ready_step` (counted from 0) begins.
    """

    nodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    ready_step: int


def pipelines(plan: TransferPlan) -> tuple[ExecutionPipeline, ...]:
    """Return pipelines that together hold each target once, the earliest first."""
    arrived = plan.arrivals()
    formed = (_assigned(nodes, arrived, plan.shape.borders) for nodes in _memberships(plan, arrived))
    return tuple(sorted(formed, key=lambda pipeline: pipeline.ready_step))


def _memberships(plan: TransferPlan, arrived: Ints) -> Iterator[tuple[int, ...]]:
    """Yield the nodes of each pipeline."""
    held = set(plan.shape.sources)
    queues = [[node for node in group if node not in held] for group in plan.groups]
    queues = [queue for queue in queues if queue]
    if not queues:
        return
    parts = chunks(len(queues), plan.shape.blocks, plan.shape.borders)
    for queue, (first, last) in zip(queues, parts, strict=True):
        # By when they have the chunk with which their sub-group begins.
        queue.sort(key=lambda node: int(arrived[node, first : max(last, first + 1)].max()))
    while len(queues) > 1:
        across = [queue.pop(0) for queue in queues]
        queues = [queue for queue in queues if queue]
        yield from _parted(across, arrived)
    for queue in queues:
        yield from _parted(queue, arrived)


def _parted(nodes: Sequence[int], arrived: Ints) -> Iterator[tuple[int, ...]]:
    """Yield parts of at most as many nodes as there are blocks, whose nodes begin with different blocks.

    A node without a block would have nothing to execute.
    """
    rest, blocks = list(nodes), arrived.shape[1]
    while len(rest) > blocks:
        yield tuple(rest.pop(int(np.argmin(arrived[rest, block]))) for block in range(blocks))
    if rest:
        yield tuple(rest)


def _assigned(nodes: Sequence[int], arrived: Ints, borders: Sequence[int]) -> ExecutionPipeline:
    """Assign ranges as sub-groups would begin with them: in the nodes' order, or in a better one."""
    ranges = chunks(len(nodes), arrived.shape[1], borders)
    first = np.array([start for start, _ in ranges])
    ready = np.maximum.reduceat(arrived[list(nodes)], first, axis=1)  # [node, range]
    parts = np.arange(len(nodes))
    chosen = min(parts, _latest_first(ready), key=lambda order: int(ready[order, parts].max()))
    return ExecutionPipeline(
        nodes=tuple(nodes[index] for index in chosen),
        chunks=ranges,
        ready_step=int(ready[chosen, parts].max()),
    )


def _latest_first(ready: Ints) -> NDArray[np.int64]:
    """Return the node for each range: the latest range chooses first, and takes the earliest node."""
    chosen = np.zeros(len(ready), dtype=np.int64)
    left = ready.copy()
    for part in np.argsort(-ready.min(axis=0), kind="stable"):
        chosen[part] = np.argmin(left[:, part])
        left[chosen[part]] = np.iinfo(np.int32).max
    return chosen
