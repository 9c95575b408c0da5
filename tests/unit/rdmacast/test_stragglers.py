"""Slow nodes are found by what pulls took, and planned around."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.simulate.link_model import LinkModel, Simulation
from rdmacast.stragglers.slow_nodes import ObservedPull, order_around, slow_nodes
from tests.fixtures.simulated_sessions import simulate_sessions

NBYTES, RATE, BLOCKS = 128 << 20, 25e6, 128


def plan_of(name: str, nodes: int, blocks: int, sources: int = 1) -> TransferPlan:
    return PLANNERS[name].plan(CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks))


def cast(planner: str, slow: dict[int, float], *, directed: bool) -> Simulation:
    """With nodes that have these shares of the rate."""
    return _cast(planner, tuple(slow.items()), directed)


@functools.cache
def _cast(planner: str, shares: tuple[tuple[int, float], ...], directed: bool) -> Simulation:
    slow = dict(shares)
    links = LinkModel(bytes_per_s=RATE, latency_s=2e-4, jitter=0.1, slow=slow)
    return simulate_sessions(plan_of(planner, 8, BLOCKS), links, NBYTES / BLOCKS, directed=directed)


def others_s(run: Simulation, straggler: int) -> float:
    return float(np.delete(run.arrived_s.max(axis=1), straggler).max())


def pulled(source: int, target: int, each_s: float, count: int, at_s: float = 0.0) -> list[ObservedPull]:
    """Return pulls one after the other."""
    return [
        ObservedPull(source, target, at_s + number * each_s, at_s + (number + 1) * each_s)
        for number in range(count)
    ]


def chain(*each_s: float) -> list[ObservedPull]:
    """Return the pulls of a chain's nodes."""
    return [pull for node, seconds in enumerate(each_s) for pull in pulled(node, node + 1, seconds, 6)]


def test_the_slow_node_is_blamed_not_those_that_it_slows() -> None:
    assert slow_nodes(chain(1.0, 4.0, 4.0, 1.0, 1.0, 1.0)) == {2}  # slow both ways
    assert slow_nodes(chain(4.0, 4.0, 1.0, 1.0, 1.0)) == {1}  # not the source
    assert slow_nodes(chain(1.0, 1.0, 1.0, 4.0)) == {4}  # not who gives to it
    assert slow_nodes(chain(1.0, 1.0, 4.0, 1.0, 1.0)) == {2}  # it takes quickly and gives slowly
    assert slow_nodes([*chain(1.0, 1.0, 1.0, 1.0), *pulled(5, 6, 4.0, 6), *pulled(6, 7, 1.0, 6)]) == {5}


def test_of_like_nodes_of_few_pulls_and_of_busy_ports_nobody_is_blamed() -> None:
    assert slow_nodes(chain(1.0, 1.9, 1.0, 1.5)) == frozenset()
    assert slow_nodes([*chain(1.0, 1.0, 1.0, 1.0), *pulled(5, 6, 9.0, 2)]) == frozenset()
    assert slow_nodes(chain(4.0, 4.0)) == slow_nodes(chain(1.0)) == slow_nodes([]) == frozenset()
    shared = [pull for target in range(1, 5) for pull in pulled(0, target, 4.0, 6)]
    assert slow_nodes([*chain(1.0, 1.0, 1.0, 1.0), *shared]) == frozenset()  # four at once, at a quarter each


def bursts(source: int, took_ms: str, every_s: float) -> list[ObservedPull]:
    """Return the pulls of a chain's next node; starts are this far apart, or as the pulls are long."""
    pulls, at_s = list[ObservedPull](), 0.0
    for seconds in (float(ms) / 1e3 for ms in took_ms.split()):
        pulls.append(ObservedPull(source, source + 1, at_s, at_s + seconds))
        at_s += max(every_s, seconds)
    return pulls


def test_who_gives_on_at_once_what_comes_to_it_now_and_then_sets_no_standard() -> None:
    """As links of like rate showed: what lay in buffers, and what shapers let through after a rest."""
    first = [*bursts(0, "10 12 11 11 11 10 10 12", 0), *bursts(1, "7 11 6 7 8 7 7 9", 0.0105)]
    rest = ["6 6 0 0 5 6 7 6", "7 8 8 12 8 9 4 6", "3 3 3 0 0 3 8 2", "0 3 0 3 1 0 0 5", "1 2 4 3 3 3 0 1"]
    others = [pull for node, took_ms in enumerate(rest, start=2) for pull in bursts(node, took_ms, 0.0105)]
    assert slow_nodes([*first, *others]) == frozenset()


def test_a_node_that_gives_in_bursts_what_it_is_slow_to_get_is_the_slow_one() -> None:
    """Not the one before it, though that is slow in as many pulls."""
    before = [*bursts(0, "6 6 4 5 5 4 6 6", 0), *bursts(1, "6 5 6 4 4 5 5 6", 0), *bursts(2, "5 " * 8, 0)]
    given = [(0, 18), (39, 1), (45, 16), (80, 2), (87, 16), (126, 1), (127, 18), (166, 5)]  # ms: at, for
    slow = [
        *bursts(3, "21 22 22 21 23 21 30 19", 0),
        *(ObservedPull(4, 5, at / 1e3, (at + took) / 1e3) for at, took in given),
    ]
    after = [*bursts(5, "1 " * 8, 0.021), *bursts(6, "1 " * 8, 0.021)]
    assert slow_nodes([*before, *slow, *after]) == {4}


def test_what_shapers_let_through_after_rests_makes_no_slow_node_of_a_steady_one() -> None:
    """Six of eight nodes rest between their pulls, and look twice as quick as any link is."""
    source = bursts(0, "20.5 " * 15, 0)
    waiting = [*bursts(1, "0.5 " * 15, 0.0205), *bursts(2, "0.5 " * 15, 0.0205)]
    slow = [*bursts(3, "85 " * 4, 0), *bursts(4, "1 " * 4, 0.085)]
    after = [*bursts(5, "1 " * 4, 0.085), *bursts(6, "1 " * 4, 0.085)]
    assert slow_nodes([*source, *waiting, *slow, *after]) == {4}


def test_what_a_shaper_lets_through_at_once_says_nothing_of_a_slow_link() -> None:
    """As a chain of half-megabyte blocks over links of 20 Mbit/s showed: only the source never rests."""
    source = bursts(0, "199 203 227 205", 0)
    rest = ["1 1 10 2", "2 1 2 2", "2 2 2 1", "2 1 2 3", "33 21 19 10", "119 119 119 106"]
    others = [pull for node, took_ms in enumerate(rest, start=1) for pull in bursts(node, took_ms, 0.21)]
    assert slow_nodes([*source, *others], max_blocks_per_s=1 / 0.21) == frozenset()
    assert slow_nodes([*source, *others])


@pytest.mark.parametrize("straggler", [1, 2, 4, 6])
def test_a_slow_node_is_found_where_those_behind_it_get_blocks_at_once(straggler: int) -> None:
    """Even the first one after the source."""
    before = [pull for node in range(straggler - 1) for pull in pulled(node, node + 1, 0.021, 8)]
    slow = bursts(straggler - 1, "84 " * 8, 0)
    behind = [pull for node in range(straggler, 7) for pull in bursts(node, "1 " * 8, 0.084)]
    assert slow_nodes([*before, *slow, *behind], max_blocks_per_s=1 / 0.021) == {straggler}


def test_the_one_source_is_never_found_since_nothing_can_be_planned_around_it() -> None:
    others = [pull for node in range(1, 5) for pull in pulled(node, node + 1, 1.0, 6)]
    pulls = [*pulled(0, 1, 4.0, 6), *others]
    assert slow_nodes(pulls) == {1}  # it may be either of both
    assert slow_nodes([*pulled(0, 2, 4.0, 6), *pulled(2, 3, 1.0, 6), *others[6:]], {0}) == frozenset()


def test_a_pull_that_never_ends_tells_too() -> None:
    stuck = [ObservedPull(source, 3, 0.0, 40.0, is_open=True) for source in (0, 1, 2)]
    assert slow_nodes([*chain(1.0, 1.0), *pulled(2, 4, 1.0, 6), *stuck]) == {3}
    young = [ObservedPull(source, 3, 5.9, 6.0, is_open=True) for source in (0, 1, 2)]
    assert slow_nodes([*chain(1.0, 1.0), *pulled(2, 4, 1.0, 6), *young]) == frozenset()


@given(
    st.sampled_from(sorted(PLANNERS)), st.integers(3, 20), st.integers(1, 16), st.integers(1, 3), st.data()
)
@settings(max_examples=30)
def test_around_slow_nodes_each_target_is_given_each_block_by_another(
    name: str, nodes: int, blocks: int, sources: int, data: st.DataObject
) -> None:
    shape = CastShape(nodes=nodes, sources=tuple(range(min(sources, nodes - 1))), blocks=blocks)
    slow = data.draw(st.sets(st.integers(0, nodes - 1)))
    fast = set(range(nodes)) - slow
    if not fast & set(shape.sources):  # slow ones are better than none
        fast |= set(shape.sources)
    for node in shape.targets:
        order = order_around(name, shape, slow, node)
        if fast <= set(shape.sources):
            assert order is None
            continue
        assert order is not None
        assert sorted(block for _, block in order) == list(range(blocks))
        assert all(source in fast and source != node for source, _ in order)


@pytest.mark.parametrize("planner", ["binomial", "chain"])
@pytest.mark.parametrize("straggler", [1, 4, 7])
def test_a_straggler_delays_the_others_by_less_than_a_quarter(straggler: int, planner: str) -> None:
    without_s = cast(planner, {}, directed=True).seconds
    run = cast(planner, {straggler: 0.25}, directed=True)
    assert others_s(run, straggler) <= 1.25 * without_s < run.seconds


def test_without_somebody_who_plans_anew_they_wait_for_it() -> None:
    without = cast("binomial", {}, directed=False)
    assert NBYTES / RATE < without.seconds < 1.3 * NBYTES / RATE
    assert others_s(cast("binomial", {4: 0.25}, directed=False), 4) > 1.5 * without.seconds
