"""The automatic choice of planner and blocks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.plan.planners.automatic import (
    MIN_BLOCK_BYTES,
    MIN_SLOW_BLOCK_BYTES,
    LinkFacts,
    PlannerChoice,
    choose_planner,
    default_link_facts,
)
from rdmacast.plan.topology import NodeTopology
from rdmacast.simulate.link_model import LinkModel
from rdmacast.simulate.plans import simulate
from rdmacast.stragglers.slow_nodes import order_around

MIB = 1 << 20
# Kernel TCP at 200 Mbit/s: a change of partners begins with a small window.
TCP = LinkFacts(bytes_per_s=25e6, latency_s=2e-4, overhead_s=2e-4, restart_s=2e-3)
RDMA = LinkFacts(bytes_per_s=50e9, latency_s=5e-6, overhead_s=5e-6)


def decide(nodes: int, facts: LinkFacts, blocks: int | None = None, nbytes: int = 128 * MIB) -> PlannerChoice:
    return choose_planner(nodes=nodes, sources=1, nbytes=nbytes, facts=facts, blocks=blocks)


def test_it_knows_which_case_it_is_in() -> None:
    assert decide(8, TCP).planner == "chain"  # few nodes, fine blocks, plain TCP
    assert decide(8, TCP, blocks=16).planner == "binomial"  # coarse blocks
    assert decide(512, TCP).planner == "binomial"  # many nodes
    far = LinkFacts(bytes_per_s=25e6, latency_s=0.05, overhead_s=2e-4, restart_s=2e-3)
    assert decide(16, far).planner == "binomial"  # high latency
    assert decide(8, RDMA).planner == decide(1024, RDMA).planner == "binomial"


def test_the_same_links_by_another_transport_are_another_case() -> None:
    assert decide(8, default_link_facts("tcp"), 512, 8192 * MIB).planner == "chain"
    for transport in ("verbs", "shm", "cuda_ipc", "nixl"):
        assert default_link_facts(transport).restart_s == 0.0
        assert decide(8, default_link_facts(transport), 512, 8192 * MIB).planner == "binomial"


def test_its_reason_is_one_line_with_the_rival_in_it() -> None:
    assert decide(16, TCP, blocks=16).reason == (
        "binomial, 16 blocks: 6.42 s where the chain takes 10.1 s with 16 blocks: 4 hops, not 15"
    )
    assert "its change of partners costs 2 ms a block" in decide(8, TCP).reason
    assert "all planners are alike" in decide(2, TCP).reason


def test_nodes_of_different_rates_get_ordered_chains() -> None:
    sites = tuple(NodeTopology(bytes_per_s=rate) for rate in (4e6, 1e6, 4e6, 2e6))
    decision = choose_planner(
        nodes=4, sources=1, nbytes=64 * MIB, facts=LinkFacts(bytes_per_s=1e6), sites=sites
    )
    assert (decision.planner, "4.0-fold" in decision.reason) == ("multi-chain", True)
    assert decision.plan(4, (0,)).groups == ((0, 2, 3, 1),)
    alike = choose_planner(
        nodes=4, sources=1, nbytes=64 * MIB, facts=LinkFacts(bytes_per_s=1e6), sites=[NodeTopology()] * 4
    )
    assert alike.planner == "binomial"


def test_one_copy_enters_each_leaf_without_a_source() -> None:
    sites = [NodeTopology(leaf=leaf) for leaf in "aaaabbbbcc"]
    decision = choose_planner(nodes=10, sources=1, nbytes=64 * MIB, facts=RDMA, sites=sites)
    assert decision.planner == "multi-chain"
    assert "2 copies between 3 leaf switches" in decision.reason
    plan = decision.plan(10, (0,))
    leaf = np.array([ord(site.leaf) for site in sites])
    crossing = leaf[plan.transfers.source] != leaf[plan.transfers.target]
    assert int(crossing.sum()) == 2 * decision.blocks
    assert plan.steps == decision.blocks + 8
    one_leaf = choose_planner(nodes=8, sources=1, nbytes=64 * MIB, facts=RDMA, sites=sites[:1] * 8)
    assert one_leaf.planner == "binomial"


def test_scale_up_domains_receive_shards() -> None:
    sites = [NodeTopology(), *(NodeTopology(domain=f"d{node // 4}") for node in range(8))]
    sources = [NodeTopology(domain="s")] * 4
    decision = choose_planner(nodes=12, sources=4, nbytes=64 * MIB, facts=RDMA, sites=[*sources, *sites[1:]])
    assert "each scale-up domain receive different blocks" in decision.reason
    plan = decision.plan(12, (0, 1, 2, 3))
    plan.validate()
    # Four ports at once: two domains, one after the other, and a step inside the last.
    assert plan.steps == -(-decision.blocks // 4) + 2
    assert decision.predicted_s < 0.3 * 64 * MIB / RDMA.bytes_per_s


def test_slow_nodes_on_leaves_are_left_at_the_edge_too() -> None:
    rates = [4e6, 4e6, 4e6, 4e6, 4e6, 1e6, 4e6, 4e6]
    sites = [NodeTopology(leaf=leaf, bytes_per_s=rate) for leaf, rate in zip("aaaabbbb", rates, strict=True)]
    decision = choose_planner(nodes=8, sources=1, nbytes=64 * MIB, facts=RDMA, sites=sites)
    assert (decision.planner, decision.edge) == ("multi-chain", (5,))
    plan = decision.plan(8, (0,))
    plan.validate()
    assert set(plan.receives(5).source.tolist()) == {4, 6, 7} and not len(plan.sends(5))
    for node in range(1, 8):
        part = plan.receives(node)
        order = order_around(decision.planner, plan.shape, decision.edge, node)
        assert order == tuple(zip(part.source.tolist(), part.block.tolist(), strict=True))


def test_few_slow_nodes_are_left_at_the_edge_of_the_others_plan() -> None:
    rates = [4e6, 4e6, 1e6, 4e6, 4e6, 5e6, 4e6, 4e6]
    decision = choose_planner(
        nodes=8,
        sources=1,
        nbytes=64 * MIB,
        facts=LinkFacts(bytes_per_s=1e6),
        sites=[NodeTopology(bytes_per_s=rate) for rate in rates],
    )
    assert decision.edge == (2,)
    assert decision.reason.endswith("; 1 of 8 nodes are slow and take what the others have")
    plan = decision.plan(8, (0,))
    plan.validate()
    assert 2 not in plan.transfers.source
    for node in range(1, 8):
        part = plan.receives(node)
        order = order_around(decision.planner, plan.shape, decision.edge, node)
        assert order == tuple(zip(part.source.tolist(), part.block.tolist(), strict=True))


@pytest.mark.parametrize(("sources", "slow"), [(1, {0}), (2, {0}), (2, {0, 1}), (7, {7}), (1, {1, 2, 3})])
def test_slow_nodes_that_are_many_or_hold_all_or_are_all_targets_are_not(
    sources: int, slow: set[int]
) -> None:
    decision = choose_planner(
        nodes=8,
        sources=sources,
        nbytes=64 * MIB,
        facts=LinkFacts(bytes_per_s=1e6),
        sites=[NodeTopology(bytes_per_s=1e6 if node in slow else 4e6) for node in range(8)],
    )
    assert decision.edge == ((0,) if (sources, slow) == (2, {0}) else ())
    decision.plan(8, tuple(range(sources))).validate()


@given(
    nodes=st.integers(1, 48),
    sources=st.integers(1, 6),
    nbytes=st.integers(1, 1 << 34),
    latency_s=st.sampled_from([0.0, 1e-5, 1e-2]),
    overhead_s=st.sampled_from([0.0, 1e-5, 1e-3]),
)
@settings(max_examples=60)
def test_every_decision_can_be_planned_and_foretells_its_simulation(
    nodes: int, sources: int, nbytes: int, latency_s: float, overhead_s: float
) -> None:
    sources = min(sources, nodes)
    facts = LinkFacts(bytes_per_s=1e9, latency_s=latency_s, overhead_s=overhead_s)
    decision = choose_planner(nodes=nodes, sources=sources, nbytes=nbytes, facts=facts)
    assert decision.blocks == 1 or nbytes / decision.blocks >= MIN_BLOCK_BYTES
    if nodes > 12:
        return
    plan = decision.plan(nodes, tuple(range(sources)))
    plan.validate()
    links = LinkModel(bytes_per_s=1e9, latency_s=latency_s, overhead_s=overhead_s, in_flight=64)
    taken_s = simulate(plan, links, nbytes / decision.blocks).seconds
    assert decision.predicted_s / 2 <= taken_s <= 2 * decision.predicted_s or sources == nodes


def test_more_overhead_a_block_makes_fewer_blocks() -> None:
    counts = [
        decide(64, LinkFacts(bytes_per_s=1e9, overhead_s=overhead_s)).blocks
        for overhead_s in (0.0, 1e-5, 1e-4, 1e-3)
    ]
    assert counts == sorted(counts, reverse=True) and counts[0] == 256 and counts[-1] < 64


def test_two_nodes_need_not_come_in_turn() -> None:
    decision = choose_planner(nodes=8, sources=4, nbytes=26 * MIB, facts=LinkFacts(bytes_per_s=2.5e6))
    assert (decision.planner, decision.in_slots) == ("chain", False)
    assert decision.blocks == 26 * MIB // MIN_SLOW_BLOCK_BYTES
    assert "all planners are alike" in decision.reason


def test_over_slow_links_blocks_are_finer() -> None:
    def decided(bytes_per_s: float) -> PlannerChoice:
        facts = replace(default_link_facts("tcp"), bytes_per_s=bytes_per_s)
        return choose_planner(nodes=8, sources=1, nbytes=26 * MIB, facts=facts)

    slow, quick = decided(2.5e6), decided(25e6)
    assert slow.blocks == 26 * MIB // MIN_SLOW_BLOCK_BYTES and slow.in_slots
    assert quick.blocks == 26 * MIB // MIN_BLOCK_BYTES


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"bytes_per_s": 0.0}, {"bytes_per_s": 1.0, "latency_s": -1.0}):
        with pytest.raises(ValueError):
            LinkFacts(**wrong)
    with pytest.raises(ValueError, match="1 to all nodes"):
        choose_planner(nodes=2, sources=3, nbytes=1, facts=RDMA)
    with pytest.raises(ValueError, match="at least 1 block"):
        decide(2, RDMA, blocks=0)
