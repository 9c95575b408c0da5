"""Nodes that join a cast while it runs extend its plan, and do not slow it down."""

import time
from collections import Counter

import numpy as np
import pytest

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.late import _free_shares, late_part
from rdmacast.plan.transfers import Transfers, gathered, ints
from rdmacast.simulate.link_model import LinkModel
from rdmacast.stragglers.slow_nodes import order_around
from tests.fixtures.simulated_sessions import simulate_sessions

BLOCKS = 40
LATE = (0, 1, 3, 9)
SHAPES = [
    CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=BLOCKS)
    for nodes, sources in ((2, 1), (4, 1), (8, 1), (13, 1), (12, 3), (7, 2), (5, 4))
]


def extended(planner: str, shape: CastShape, late: int) -> TransferPlan:
    """Return the plan with the late nodes' parts after it."""
    plan = PLANNERS[planner].plan(shape)
    parts, step = [plan.transfers], plan.steps
    for number in range(late):
        sources, blocks = zip(*late_part(planner, shape, number), strict=True)
        target = np.full(len(blocks), shape.nodes + number)
        parts.append(
            Transfers(ints(step + np.arange(len(blocks))), ints(sources), ints(target), ints(blocks))
        )
        step += len(blocks)
    whole = CastShape(nodes=shape.nodes + late, sources=shape.sources, blocks=shape.blocks)
    groups = (*plan.groups, *((node,) for node in range(shape.nodes, whole.nodes)))
    return TransferPlan(planner=planner, shape=whole, groups=groups, transfers=gathered(parts))


def ended_s(plan: TransferPlan, planned: int) -> tuple[float, float]:
    """Return when the planned and when the late nodes hold everything, in copies, if all begin together."""
    links = LinkModel(bytes_per_s=float(BLOCKS), latency_s=0.001)
    arrived_s = simulate_sessions(plan, links).arrived_s.max(axis=1)
    return float(arrived_s[:planned].max()), float(arrived_s[planned:].max(initial=0.0))


@pytest.mark.parametrize("planner", list(PLANNERS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_extended_plan_is_valid(planner: str, shape: CastShape) -> None:
    for late in LATE:
        extended(planner, shape, late).validate()


@pytest.mark.parametrize("planner", ["binomial", "chain", "multi-chain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_node_sends_much_more_than_one_copy(planner: str, shape: CastShape) -> None:
    for late in LATE:
        sent = Counter(extended(planner, shape, late).transfers.source.tolist())
        assert max(sent.values()) <= 1.1 * BLOCKS


@pytest.mark.parametrize("planner", ["binomial", "chain", "multi-chain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("late", [1, 3])
def test_late_nodes_hardly_slow_the_others(planner: str, shape: CastShape, late: int) -> None:
    alone_s, _ = ended_s(extended(planner, shape, 0), shape.nodes)
    planned_s, late_s = ended_s(extended(planner, shape, late), shape.nodes)
    assert planned_s < 1.15 * alone_s and late_s < 1.3 * alone_s


def test_from_any_holder_they_would_take_half_of_the_source() -> None:
    """What the extension is for: such nodes have no part, and pull the rarest blocks from any holder."""
    shape = CastShape(nodes=4, sources=(0,), blocks=BLOCKS)
    plan = PLANNERS["chain"].plan(shape)
    whole = CastShape(nodes=7, sources=(0,), blocks=BLOCKS)
    anywhere = TransferPlan(planner="chain", shape=whole, groups=plan.groups, transfers=plan.transfers)
    planned_s, late_s = ended_s(anywhere, 4)
    assert planned_s > 1.8 and late_s > 1.5


def test_a_chain_grows_at_its_end() -> None:
    one, two = (CastShape(nodes=5, sources=tuple(range(k)), blocks=4) for k in (1, 2))
    assert [senders(late_part("chain", one, late)) for late in range(3)] == [{4}, {5}, {6}]
    assert [senders(late_part("chain", two, late)) for late in range(4)] == [{4}, {3}, {5}, {6}]
    assert [senders(late_part("multi-chain", two, late)) for late in range(4)] == [{3}, {4}, {5}, {6}]


def test_a_binomial_pipeline_and_a_tree_give_where_they_have_something_left() -> None:
    shape = CastShape(nodes=4, sources=(0,), blocks=4)
    assert [senders(late_part("binomial", shape, late)) for late in range(2)] == [{1, 2, 3}, {4}]
    assert [senders(late_part("tree", shape, late)) for late in range(2)] == [{2, 3}, {4}]


def test_a_source_without_targets_is_used_first() -> None:
    shape = CastShape(nodes=5, sources=(0, 1, 2), blocks=4)
    assert senders(late_part("chain", shape, 0)) == {2}
    assert senders(late_part("multi-chain", shape, 0)) == {2}


def test_with_1024_nodes_and_512_blocks_it_takes_less_than_50_milliseconds() -> None:
    """Processor time, the least of three, of the first part in a process."""
    shape = CastShape(nodes=1024, sources=(0,), blocks=512)
    taken_s = []
    for _ in range(3):
        _free_shares.cache_clear()
        began_s = time.process_time()
        assert len(late_part("binomial", shape, 3)) == 512
        taken_s.append(time.process_time() - began_s)
    assert min(taken_s) < 0.05


def test_a_slow_node_passes_nothing_on() -> None:
    shape = CastShape(nodes=4, sources=(0,), blocks=4)
    assert senders(order_around("chain", shape, (), 6)) == {5}
    assert senders(order_around("chain", shape, (5,), 6)) == {4}
    assert senders(order_around("chain", shape, (3,), 4)) == {2}
    assert senders(order_around("chain", shape, (4,), 4)) == {0, 1, 2, 3}
    assert order_around("chain", shape, (1, 2, 3), 4) is None


def senders(order: tuple[tuple[int, int], ...] | None) -> set[int]:
    assert order is not None
    assert sorted(block for _, block in order) == [0, 1, 2, 3]
    return {source for source, _ in order}
