"""Plans carried out on imagined links."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import PLANNERS, bound
from rdmacast.plan.planners.multi_chain import multi_chain
from rdmacast.plan.topology import NodeTopology
from rdmacast.plan.transfers import Transfers, ints
from rdmacast.simulate.link_model import LinkModel
from rdmacast.simulate.plans import simulate


def plan_of(name: str, nodes: int, blocks: int, sources: int = 1) -> TransferPlan:
    return PLANNERS[name].plan(CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks))


cases = st.tuples(st.integers(2, 40), st.integers(1, 24), st.integers(1, 4)).filter(lambda c: c[2] < c[0])


@pytest.mark.parametrize("name", PLANNERS)
@given(case=cases)
@settings(max_examples=25)
def test_with_unit_links_it_takes_the_plans_steps(name: str, case: tuple[int, int, int]) -> None:
    plan = plan_of(name, *case)
    run = simulate(plan, LinkModel())
    if name == "scatter-allgather":  # the ring may begin before the scatter has ended
        assert bound(plan.shape) <= run.seconds <= plan.steps
    else:
        assert run.seconds == plan.steps
    assert np.all(run.arrived_s <= plan.arrivals())


@pytest.mark.parametrize("name", PLANNERS)
@given(
    case=cases,
    rate=st.floats(1, 1e9),
    latency_s=st.floats(0, 1),
    jitter=st.floats(0, 1),
    in_flight=st.integers(1, 4),
    slowest=st.floats(0.1, 1.0),
)
@settings(max_examples=15)
def test_nothing_is_faster_than_the_links(
    name: str,
    case: tuple[int, int, int],
    rate: float,
    latency_s: float,
    jitter: float,
    in_flight: int,
    slowest: float,
) -> None:
    plan = plan_of(name, *case)
    links = LinkModel(
        bytes_per_s=rate,
        latency_s=latency_s,
        jitter=jitter,
        in_flight=in_flight,
        slow={case[0] - 1: slowest},
        seed=7,
    )
    block_bytes = 1000.0
    run = simulate(plan, links, block_bytes)
    nbytes = block_bytes * plan.shape.blocks
    assert run.first_full_s >= (nbytes / rate + latency_s) * (1 - 1e-9)
    assert run.complete_s[-1] >= (nbytes / (rate * slowest)) * (1 - 1e-9)
    assert run.first_full_s <= run.seconds == run.complete_s.max()
    again = simulate(plan, links, block_bytes)
    assert np.array_equal(run.arrived_s, again.arrived_s)


@pytest.mark.parametrize("name", PLANNERS)
@given(
    case=cases,
    jitter=st.sampled_from([0.0, 0.1, 1.0]),
    latency_s=st.sampled_from([0.0, 0.3, 2.0]),
    overhead_s=st.sampled_from([0.0, 0.2]),
    in_flight=st.integers(1, 4),
    slow=st.dictionaries(st.integers(0, 39), st.floats(0.1, 1.0), max_size=3),
)
@settings(max_examples=25)
def test_both_ways_to_compute_it_tell_the_same(
    name: str,
    case: tuple[int, int, int],
    jitter: float,
    latency_s: float,
    overhead_s: float,
    in_flight: int,
    slow: dict[int, float],
) -> None:
    plan = plan_of(name, *case)
    links = LinkModel(
        latency_s=latency_s,
        overhead_s=overhead_s,
        jitter=jitter,
        in_flight=in_flight,
        slow={node: share for node, share in slow.items() if node < case[0]},
    )
    single, waves = (simulate(plan, links, waves=waves).arrived_s for waves in (False, True))
    assert np.array_equal(single, waves)


def test_a_straggler_at_the_end_of_a_chain_holds_up_nobody() -> None:
    plan = plan_of("chain", 6, 32)
    without, run = simulate(plan, LinkModel()), simulate(plan, LinkModel(slow={5: 0.25}))
    assert np.array_equal(run.complete_s[:-1], without.complete_s[:-1])
    assert run.complete_s[-1] > 3 * without.complete_s[-1]
    # In the middle it holds up those behind it, and nobody before.
    middle = simulate(plan, LinkModel(slow={3: 0.25}))
    assert np.array_equal(middle.complete_s[:2], without.complete_s[:2])
    assert middle.complete_s[-1] > 3 * without.complete_s[-1]


def test_pulls_in_flight_hide_the_latency() -> None:
    plan = plan_of("chain", 2, 64)
    alone, several = (simulate(plan, LinkModel(latency_s=1.0, in_flight=pulls)).seconds for pulls in (1, 2))
    assert (alone, several) == (64 * 2.0, 64 + 1.0)


def test_pairs_of_nodes_have_links_of_their_own() -> None:
    plan = plan_of("chain", 3, 8)
    run = simulate(plan, LinkModel(pairs={(1, 2): (0.5, 0.5)}))
    assert run.complete_s[0] == 8
    assert run.complete_s[1] == pytest.approx(1 + 8 * 2.5)


def test_overheads_count_at_both_ends() -> None:
    assert simulate(plan_of("chain", 3, 8), LinkModel(overhead_s=0.5)).seconds == 9 * 1.5


def test_blocks_spread_inside_a_scale_up_domain_in_no_time() -> None:
    sites = [NodeTopology()] + [NodeTopology(domain="d")] * 4
    plan = multi_chain(CastShape(nodes=5, sources=(0,), blocks=16, sites=tuple(sites)))
    assert simulate(plan, LinkModel()).seconds == 16


def test_one_of_many_nodes_needs_little_more_than_the_limit() -> None:
    plan = plan_of("binomial", 500, 64)
    run = simulate(plan, LinkModel(latency_s=0.01, jitter=0.05, in_flight=3))
    assert 64 < run.seconds < 1.5 * plan.steps


def test_what_cannot_end_or_be_is_refused() -> None:
    transfers = Transfers(ints([0, 0]), ints([1, 2]), ints([2, 1]), ints([0, 0]))
    shape = CastShape(nodes=3, sources=(0,), blocks=1)
    circle = TransferPlan(planner="test", shape=shape, groups=((0, 1, 2),), transfers=transfers)
    with pytest.raises(ValueError, match="node 1 waits for block 0"):
        simulate(circle, LinkModel())
    with pytest.raises(ValueError, match="node 1 waits for block 0"):
        simulate(circle, LinkModel(), waves=True)
    with pytest.raises(ValueError, match="cannot be simulated in waves"):
        simulate(plan_of("chain", 3, 8), LinkModel(pairs={(1, 2): (0.5, 0.5)}), waves=True)
    for wrong in ({"bytes_per_s": 0}, {"latency_s": -1}, {"in_flight": 0}, {"slow": {1: 0.0}}):
        with pytest.raises(ValueError):
            LinkModel(**wrong)  # type: ignore[arg-type]
