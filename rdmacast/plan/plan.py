"""A transfer plan: which node sends which block to which node, and in which order (pure).

Time is counted in steps from 0; in one step a node sends at most one block and receives at most one. A step
is an order, not a barrier: a node pulls each block as soon as its source has it.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rdmacast.errors import PlanError
from rdmacast.plan.topology import NodeTopology, domains_of
from rdmacast.plan.transfers import Ints, Transfers, ints

MAX_NODES = 1 << 16
MAX_BLOCKS = 1 << 16
MAX_TRANSFERS = 1 << 25  # half a GiB of arrays: a plan above this is a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class CastShape:
    """The input of a planner: `nodes` nodes numbered from 0, those that hold the model, and its blocks.

    Where several sources make several block orders, these begin at some of the `borders`, if any are given:
    ascending blocks in each of which a unit begins that is useful only as a whole, such as a layer.
    `sites` is the topology of the nodes, empty where they are alike; planners of chains use it. A transfer
    inside a scale-up domain (of nodes joined by NVLink, for example) uses no port of the network.
    """

    nodes: int
    sources: tuple[int, ...]
    blocks: int
    borders: tuple[int, ...] = ()
    sites: tuple[NodeTopology, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"a plan is for 1 to {MAX_NODES} nodes, not {self.nodes}")
        if not 1 <= self.blocks <= MAX_BLOCKS:
            raise ValueError(f"a plan is for 1 to {MAX_BLOCKS} blocks, not {self.blocks}")
        if not self.sources:
            raise ValueError("a plan needs a source")
        if len(set(self.sources)) != len(self.sources):
            raise ValueError("a node can be named as a source only once")
        if not all(0 <= source < self.nodes for source in self.sources):
            raise ValueError(f"the sources must be among the nodes 0 to {self.nodes - 1}")
        if any(b <= a for a, b in pairwise((-1, *self.borders, self.blocks))):
            raise ValueError(f"borders are ascending blocks below {self.blocks}, each named once")
        if len(self.sites) not in (0, self.nodes):
            raise ValueError(f"{len(self.sites)} sites were given for {self.nodes} nodes")
        if self.transfers > MAX_TRANSFERS:
            raise ValueError(
                f"{self.nodes} nodes and {self.blocks} blocks make {self.transfers} transfers, "
                f"more than the {MAX_TRANSFERS} of a plan"
            )

    @property
    def targets(self) -> tuple[int, ...]:
        held = set(self.sources)
        return tuple(node for node in range(self.nodes) if node not in held)

    @property
    def transfers(self) -> int:
        """The number of transfers in every plan of this shape."""
        return (self.nodes - len(self.sources)) * self.blocks


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TransferPlan:
    """The transfers of one cast, sorted by step.

    `groups` are the sub-groups (chains, for chain planners): the source of each first, then its targets in
    the planner's order. With `whole` a target sends nothing before it holds everything.
    """

    planner: str
    shape: CastShape
    groups: tuple[tuple[int, ...], ...]
    transfers: Transfers
    whole: bool = False
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        if np.any(np.diff(self.transfers.step) < 0):
            raise ValueError("the transfers of a plan must be sorted by step")
        object.__setattr__(self, "steps", self.transfers.steps)

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"TransferPlan({self.planner}: {len(shape.sources)} of {shape.nodes} nodes, "
            f"{shape.blocks} blocks, {self.steps} steps)"
        )

    def arrivals(self) -> Ints:
        """Return the first step, counted from 0, at which each node holds each block: int32 [node, block].

        Sources hold all at 0; -1 where a block never arrives.
        """
        arrived = np.full((self.shape.nodes, self.shape.blocks), -1, dtype=np.int32)
        moved = self.transfers
        # Backwards, so that the first arrival of a block counts.
        arrived[moved.target[::-1], moved.block[::-1]] = moved.step[::-1] + 1
        arrived[list(self.shape.sources)] = 0
        return arrived

    def is_local(self) -> NDArray[np.bool_]:
        """Return a mask of the transfers that stay inside a scale-up domain."""
        sites, moved = self.shape.sites, self.transfers
        if not sites:
            return np.zeros(len(moved), dtype=np.bool_)
        domains = ints(domains_of(sites))
        return np.asarray(domains[moved.source] == domains[moved.target])

    def receives(self, node: int) -> Transfers:
        """Return what a node pulls, in order: all that it needs of the plan."""
        return self.transfers.chosen(self.transfers.target == node)

    def sends(self, node: int) -> Transfers:
        return self.transfers.chosen(self.transfers.source == node)

    def validate(self) -> None:
        """Raise PlanError, with the step, node and block of the first fault that is found.

        Every number is of the plan; each target gets each block exactly once; no node sends a block that it
        does not hold when the step begins; a node sends at most one block and receives at most one in a
        step, transfers inside a scale-up domain aside; and with `whole` only complete nodes send.
        """
        _check_groups(self)
        _check_numbers(self)
        arrived = self.arrivals()
        _check_held(self, arrived)
        _check_ports(self)
        _check_once(self, arrived)


def _check_groups(plan: TransferPlan) -> None:
    shape = plan.shape
    if sorted(node for group in plan.groups for node in group) != list(range(shape.nodes)):
        raise PlanError("the groups of the plan do not hold each node once")


def _check_numbers(plan: TransferPlan) -> None:
    shape, moved = plan.shape, plan.transfers
    source, target, block = moved.source, moved.target, moved.block
    _refuse(plan, source, moved.step < 0, "there is no such step")
    _refuse(plan, source, (source < 0) | (source >= shape.nodes), "there is no such source")
    _refuse(plan, target, (target < 0) | (target >= shape.nodes), "there is no such target")
    _refuse(plan, source, (block < 0) | (block >= shape.blocks), "there is no such block")
    _refuse(plan, source, source == target, "it sends to itself")
    held = np.zeros(shape.nodes, dtype=np.bool_)
    held[list(shape.sources)] = True
    _refuse(plan, target, held[target], "it is a source and holds the block from the start")


def _check_held(plan: TransferPlan, arrived: Ints) -> None:
    moved = plan.transfers
    came = arrived[moved.source, moved.block]
    _refuse(plan, moved.source, (came < 0) | (came > moved.step), "it sends a block that it lacks")
    if plan.whole:
        never = (arrived < 0).any(axis=1)
        complete = np.where(never, np.iinfo(np.int32).max, arrived.max(axis=1))
        early = complete[moved.source] > moved.step
        _refuse(plan, moved.source, early, "it sends before it holds the whole model")


def _check_ports(plan: TransferPlan) -> None:
    moved = plan.transfers
    over_network = ~plan.is_local()
    for nodes, words in (
        (moved.source, "it sends more than one block in the step"),
        (moved.target, "it receives more than one block in the step"),
    ):
        ports = moved.step.astype(np.int64) * plan.shape.nodes + nodes
        again = _repeated(np.where(over_network, ports, -1))
        _refuse(plan, nodes, over_network & again, words)


def _check_once(plan: TransferPlan, arrived: Ints) -> None:
    moved = plan.transfers
    places = moved.target.astype(np.int64) * plan.shape.blocks + moved.block
    _refuse(plan, moved.target, _repeated(places), "it has received the block before")
    missing = np.argwhere(arrived < 0)
    if len(missing):
        node, block = map(int, missing[0])
        raise PlanError(f"node {node} never gets block {block}", node=node, block=block)


def _repeated(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the keys that occurred before."""
    again = np.ones(len(keys), dtype=np.bool_)
    again[np.unique(keys, return_index=True)[1]] = False
    return again


def _refuse(plan: TransferPlan, nodes: Ints, wrong: NDArray[np.bool_], words: str) -> None:
    """Raise PlanError for the first of the `wrong` transfers; `nodes` are the nodes at fault."""
    if not wrong.any():
        return
    index = int(np.argmax(wrong))
    moved = plan.transfers
    step, node, block = int(moved.step[index]), int(nodes[index]), int(moved.block[index])
    way = f"{int(moved.source[index])} to {int(moved.target[index])}"
    raise PlanError(
        f"node {node} at step {step}, block {block} ({way}): {words}", step=step, node=node, block=block
    )
