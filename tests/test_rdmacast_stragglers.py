"""Slow nodes are found by what pulls took, and planned around."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.links import Links, Simulation
from rdmacast.plan import CastShape, TransferPlan
from rdmacast.planners.catalog import PLANNERS
from rdmacast.simulate_sessions import simulate_sessions
from rdmacast.stragglers import Observed, around, slow_nodes

NBYTES, RATE, BLOCKS = 128 << 20, 25e6, 64


def plan_of(name: str, nodes: int, blocks: int, sources: int = 1) -> TransferPlan:
    return PLANNERS[name].plan(CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks))


def cast(slow: dict[int, float], *, directed: bool) -> Simulation:
    links = Links(bytes_per_s=RATE, latency_s=2e-4, jitter=0.1, slow=slow)
    return simulate_sessions(plan_of("binomial", 8, BLOCKS), links, NBYTES / BLOCKS, directed=directed)


def others_s(run: Simulation, straggler: int) -> float:
    return float(np.delete(run.arrived_s.max(axis=1), straggler).max())


def test_the_slow_node_is_blamed_not_those_that_it_slows() -> None:
    quick = [Observed(source, target, 1.0) for source, target in ((2, 3), (3, 4), (4, 5)) for _ in range(6)]
    slow = [Observed(0, 1, 4.0)] * 5 + [Observed(1, 2, 4.5)] * 5
    assert slow_nodes([*quick, *slow]) == {1}
    assert slow_nodes(quick) == slow_nodes(slow[:3]) == frozenset()


@given(
    st.sampled_from(sorted(PLANNERS)), st.integers(3, 20), st.integers(1, 16), st.integers(1, 3), st.data()
)
@settings(max_examples=30, deadline=None)
def test_around_slow_nodes_each_target_is_given_each_block_by_another(
    name: str, nodes: int, blocks: int, sources: int, data: st.DataObject
) -> None:
    plan = plan_of(name, nodes, blocks, min(sources, nodes - 1))
    slow = data.draw(st.sets(st.integers(0, nodes - 1)))
    orders = around(plan, slow)
    fast = set(range(nodes)) - slow
    if not fast & set(plan.shape.sources) or fast <= set(plan.shape.sources):
        assert orders is None
        return
    assert orders is not None and set(orders) == set(range(nodes))
    for node, order in orders.items():
        if node not in plan.shape.sources:
            assert sorted(block for _, block in order) == list(range(blocks))
        assert all(source in fast and source != node for source, _ in order)


@pytest.mark.parametrize("straggler", [1, 4, 7])
def test_a_straggler_delays_the_others_by_less_than_a_quarter(straggler: int) -> None:
    without_s = cast({}, directed=True).seconds
    run = cast({straggler: 0.25}, directed=True)
    assert others_s(run, straggler) <= 1.25 * without_s < run.seconds


def test_without_somebody_who_plans_anew_they_wait_for_it() -> None:
    without = cast({}, directed=False)
    assert NBYTES / RATE < without.seconds < 1.3 * NBYTES / RATE
    assert others_s(cast({4: 0.25}, directed=False), 4) > 2 * without.seconds
