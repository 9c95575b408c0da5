"""Chains over a topology."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.late import late_part
from rdmacast.plan.planners.multi_chain import multi_chain
from rdmacast.plan.planners.own_part import own_part
from rdmacast.plan.topology import NodeTopology
from rdmacast.stragglers.slow_nodes import order_around


def cast(sites: list[NodeTopology], sources: tuple[int, ...] = (0,), blocks: int = 4) -> TransferPlan:
    plan = multi_chain(CastShape(nodes=len(sites), sources=sources, blocks=blocks, sites=tuple(sites)))
    plan.validate()
    return plan


def senders(plan: TransferPlan, target: int) -> set[int]:
    return set(plan.receives(target).source.tolist())


@st.composite
def topologies(draw: st.DrawFn) -> tuple[list[NodeTopology], tuple[int, ...]]:
    """Nodes on up to three leaves; a scale-up domain stays under one leaf."""
    sites = []
    for _ in range(draw(st.integers(1, 24))):
        domain = draw(st.none() | st.integers(0, 3))
        sites.append(
            NodeTopology(
                leaf=f"l{draw(st.integers(0, 2)) if domain is None else domain % 2}",
                domain="" if domain is None else f"d{domain}",
                bytes_per_s=draw(st.sampled_from([1.0, 2.0, 4.0])),
            )
        )
    sources = draw(st.sets(st.integers(0, len(sites) - 1), min_size=1, max_size=4))
    return sites, tuple(sources)


@given(topologies(), st.integers(1, 20))
@settings(max_examples=60)
def test_chains_are_valid_over_every_topology(
    topology: tuple[list[NodeTopology], tuple[int, ...]], blocks: int
) -> None:
    sites, sources = topology
    cast(sites, sources, blocks)


def test_the_fastest_nodes_come_first() -> None:
    rates = [4.0, 1.0, 4.0, 2.0]
    plan = cast([NodeTopology(bytes_per_s=rate) for rate in rates])
    assert plan.groups == ((0, 2, 3, 1),)
    assert [senders(plan, node) for node in (2, 3, 1)] == [{0}, {2}, {3}]


def test_targets_are_fed_inside_their_leaf_and_every_source_is_used() -> None:
    sites = [NodeTopology(leaf=leaf) for leaf in "abbaba"]
    plan = cast(sites, sources=(0, 1))
    leaf = np.array([site.leaf for site in sites])
    assert np.all(leaf[plan.transfers.source] == leaf[plan.transfers.target])
    assert sorted(map(sorted, plan.groups)) == [[0, 3, 5], [1, 2, 4]]
    alike = cast([NodeTopology()] * 7, sources=(0, 1, 2))
    assert sorted(map(len, alike.groups)) == [2, 2, 3]


def test_a_leaf_without_a_source_is_entered_once() -> None:
    sites = [NodeTopology(leaf=leaf) for leaf in "aabbb"]
    plan = cast(sites)
    leaf = np.array([site.leaf for site in sites])
    crossing = leaf[plan.transfers.source] != leaf[plan.transfers.target]
    assert int(crossing.sum()) == plan.shape.blocks


def test_a_scale_up_domain_is_one_link_of_a_chain_whose_ports_share_the_blocks() -> None:
    sites = [NodeTopology(domain=f"d{node // 4}") for node in range(12)]
    plan = cast(sites, blocks=16)
    # The source's neighbours get all over NVLink, and then four ports feed four.
    assert senders(plan, 3) == {0}
    over_network = plan.transfers.chosen(~plan.is_local())
    assert len(over_network) == 2 * 16
    for node in range(4, 12):
        assert int((over_network.target == node).sum()) == 4
    one_port = cast([NodeTopology()] + [NodeTopology(domain="d")] * 4, blocks=16)
    assert one_port.steps == 16 + 1


def test_several_slow_sources_feed_a_fast_target_together() -> None:
    sites = [NodeTopology(), NodeTopology(), NodeTopology(bytes_per_s=2.0)]
    plan = cast(sites, sources=(0, 1))
    assert senders(plan, 2) == {0, 1}


@given(topologies(), st.integers(1, 20))
@settings(max_examples=60)
def test_the_own_part_of_each_node_is_that_of_the_plan(
    topology: tuple[list[NodeTopology], tuple[int, ...]], blocks: int
) -> None:
    sites, sources = topology
    plan = cast(sites, sources, blocks)
    for node in plan.shape.targets:
        part = plan.receives(node)
        whole = list(zip(part.source.tolist(), part.block.tolist(), strict=True))
        own = own_part("multi-chain", plan.shape, node)
        assert sorted(own) == sorted(whole)
        # From each source in the plan's order.
        for source in {source for source, _ in whole}:
            assert [one for one in own if one[0] == source] == [one for one in whole if one[0] == source]


@pytest.mark.parametrize("sources", [1, 8, 500])
def test_of_1024_nodes_on_leaves_and_in_domains_it_takes_little_time(sources: int) -> None:
    """Processor time, the least of three."""
    sites = tuple(NodeTopology(leaf=f"l{node % 32}", domain=f"d{node % 128}") for node in range(1024))
    shape = CastShape(nodes=1024, sources=tuple(range(sources)), blocks=512, sites=sites)
    taken_s = []
    for _ in range(3):
        began_s = time.process_time()
        assert len(own_part("multi-chain", shape, 1000)) == 512
        taken_s.append(time.process_time() - began_s)
    assert min(taken_s) < 0.02


def test_a_late_node_joins_the_chain_that_ends_under_its_leaf() -> None:
    sites = tuple(NodeTopology(leaf=leaf) for leaf in "abab")
    shape = CastShape(nodes=4, sources=(0, 1), blocks=4, sites=sites)
    late = [NodeTopology(leaf=leaf) for leaf in "bbac"]
    parts = [late_part("multi-chain", shape, number, late[: number + 1]) for number in range(4)]
    assert [{source for source, _ in part} for part in parts] == [{3}, {4}, {2}, {6}]
    assert all([block for _, block in part] == [0, 1, 2, 3] for part in parts)


def test_a_slow_node_pulls_from_its_own_leaf() -> None:
    sites = tuple(NodeTopology(leaf=leaf) for leaf in "aabbb")
    shape = CastShape(nodes=5, sources=(0,), blocks=6, sites=sites)
    orders = {node: order_around("multi-chain", shape, (3,), node) for node in (1, 2, 3, 4)}
    found = {node: {source for source, _ in order or ()} for node, order in orders.items()}
    assert found == {1: {0}, 2: {1}, 3: {2, 4}, 4: {2}}


def test_bad_topologies_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sites were given for 2 nodes"):
        CastShape(nodes=2, sources=(0,), blocks=1, sites=(NodeTopology(),) * 3)
    with pytest.raises(ValueError, match="above 0"):
        NodeTopology(bytes_per_s=0.0)
