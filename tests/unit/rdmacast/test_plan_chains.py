"""Chains over a topology."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.multi_chain import multi_chain
from rdmacast.plan.planners.topology import NodeTopology


def cast(sites: list[NodeTopology], sources: tuple[int, ...] = (0,), blocks: int = 4) -> TransferPlan:
    plan = multi_chain(CastShape(nodes=len(sites), sources=sources, blocks=blocks), sites)
    plan.validate()
    return plan


def senders(plan: TransferPlan, target: int) -> set[int]:
    return set(plan.receives(target).source.tolist())


@st.composite
def topologies(draw: st.DrawFn) -> tuple[list[NodeTopology], tuple[int, ...]]:
    """Nodes on up to three leaves; a scale-up domain stays under one leaf."""
    sites = []
    for node in range(draw(st.integers(1, 24))):
        domain = draw(st.none() | st.integers(0, 3))
        sites.append(
            NodeTopology(
                leaf=draw(st.integers(0, 2)) if domain is None else domain % 2,
                domain=domain,
                bytes_per_s=draw(st.sampled_from([1.0, 2.0, 4.0])),
                serves_prefill=draw(st.booleans()) if node % 3 == 0 else False,
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
    plan = cast(sites, sources, blocks)
    free = [source for source in sources if not sites[source].serves_prefill]
    over_network = plan.transfers.chosen(~plan.is_local())
    if free:
        assert not {s for s in over_network.source.tolist() if s in sources} - set(free)


def test_the_fastest_nodes_come_first() -> None:
    rates = [4.0, 1.0, 4.0, 2.0]
    plan = cast([NodeTopology(bytes_per_s=rate) for rate in rates])
    assert plan.groups == ((0, 2, 3, 1),)
    assert [senders(plan, node) for node in (2, 3, 1)] == [{0}, {2}, {3}]


def test_sources_that_serve_prefill_send_only_where_nobody_else_can() -> None:
    busy = NodeTopology(serves_prefill=True)
    plan = cast([busy, NodeTopology(), NodeTopology(), NodeTopology()], sources=(0, 1))
    assert not len(plan.sends(0)) and plan.groups == ((1, 2, 3), (0,))
    assert len(cast([busy, NodeTopology(), NodeTopology()]).sends(0)) == 4


def test_targets_are_fed_inside_their_leaf_and_every_source_is_used() -> None:
    sites = [NodeTopology(leaf=leaf) for leaf in (0, 1, 1, 0, 1, 0)]
    plan = cast(sites, sources=(0, 1))
    leaf = np.array([site.leaf for site in sites])
    assert np.all(leaf[plan.transfers.source] == leaf[plan.transfers.target])
    assert sorted(map(sorted, plan.groups)) == [[0, 3, 5], [1, 2, 4]]
    alike = cast([NodeTopology()] * 7, sources=(0, 1, 2))
    assert sorted(map(len, alike.groups)) == [2, 2, 3]


def test_a_leaf_without_a_source_is_entered_once() -> None:
    sites = [NodeTopology(leaf=leaf) for leaf in (0, 0, 1, 1, 1)]
    plan = cast(sites)
    leaf = np.array([site.leaf for site in sites])
    crossing = leaf[plan.transfers.source] != leaf[plan.transfers.target]
    assert int(crossing.sum()) == plan.shape.blocks


def test_a_scale_up_domain_is_one_link_of_a_chain_whose_ports_share_the_blocks() -> None:
    sites = [NodeTopology(domain=node // 4) for node in range(12)]
    plan = cast(sites, blocks=16)
    # The source's neighbours get all over NVLink, and then four ports feed four.
    assert senders(plan, 3) == {0}
    over_network = plan.transfers.chosen(~plan.is_local())
    assert len(over_network) == 2 * 16
    for node in range(4, 12):
        assert int((over_network.target == node).sum()) == 4
    one_port = cast([NodeTopology()] + [NodeTopology(domain=1)] * 4, blocks=16)
    assert one_port.steps == 16 + 1


def test_several_slow_sources_feed_a_fast_target_together() -> None:
    sites = [NodeTopology(), NodeTopology(), NodeTopology(bytes_per_s=2.0)]
    plan = cast(sites, sources=(0, 1))
    assert senders(plan, 2) == {0, 1}


def test_bad_topologies_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sites were given for 2 nodes"):
        multi_chain(CastShape(nodes=2, sources=(0,), blocks=1), [NodeTopology()] * 3)
    with pytest.raises(ValueError, match="above 0"):
        NodeTopology(bytes_per_s=0.0)
