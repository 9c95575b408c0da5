"""Casts of real nodes: every planner, any number of nodes and sources, identical bytes, reports."""

from collections import Counter

import pytest

from rdmacast.plan.planners.catalog import PLANNERS
from tests.fixtures.cast import BLOCK_BYTES, BLOCKS, CONTENT, KINDS, NBYTES, make_rig


@pytest.mark.parametrize("planner", list(PLANNERS))
@pytest.mark.parametrize("kind", [*KINDS, "shm"])
async def test_all_targets_get_all_bytes_with_every_planner(kind: str, planner: str) -> None:
    for nodes, sources in [(2, 1), (3, 2), (5, 1), (7, 3), (8, 1), (12, 2)]:
        async with make_rig(kind, nodes, sources, planner) as rig:
            rig.start()
            reports = await rig.reports()
        assert [report.state for report in reports] == ["complete"] * (nodes - sources)
        for report in reports:
            assert report.nbytes == NBYTES and report.held == BLOCKS
            assert dict(report.bytes_by_transport) == {"shm" if kind == "shm" else "tcp": NBYTES}
            assert set(report.choices) >= set(report.bytes_by_peer)
            assert (report.faults.damaged, report.faults.failed, dict(report.faults.lost)) == (0, 0, {})
            assert report.first_block_s is not None and report.last_block_s is not None
            assert 0 <= report.first_block_s <= report.last_block_s <= report.seconds


@pytest.mark.parametrize("late", [0, 3])
async def test_each_block_comes_from_its_planned_source(late: int) -> None:
    async with make_rig("tcp", 6, planner="chain", late=late) as rig:
        rig.start()
        reports = await rig.reports()
        for index, report in enumerate(reports):
            assert dict(report.bytes_by_peer) == {f"n{index}": NBYTES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planner", ["binomial", "chain", "multi-chain"])
async def test_sources_that_hold_everything_are_not_asked_first(kind: str, planner: str) -> None:
    async with make_rig(kind, 5, 2, planner, tier="host") as rig:
        rig.start()
        reports = await rig.reports()
        assert {report.state for report in reports} == {"complete"}
        assert all(not report.faults.failed and not report.faults.lost for report in reports)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_source_that_lost_its_copy_is_left_for_another(kind: str) -> None:
    async with make_rig(kind, 4, 2, tier="host") as rig:
        await rig.kill(0)
        rig.start(2, 3)
        reports = await rig.reports()
        assert {report.state for report in reports} == {"complete"}
        assert set(reports[0].faults.lost) == {"n0"} and reports[0].faults.failed <= 3  # one window


async def test_a_source_that_cannot_be_reached_is_lost_once(caplog: pytest.LogCaptureFixture) -> None:
    async with make_rig("memory", 3, 2, tier="host") as rig:
        await rig.kill(0)
        rig.start()
        (report,) = await rig.reports()
    assert report.faults.failed > 1 and caplog.text.count("lost n0") == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_domains_receive_different_blocks_and_gather_inside(kind: str) -> None:
    places = [("a", "s"), ("a", "s"), ("a", "x"), ("a", "x"), ("b", "y"), ("b", "y")]
    async with make_rig(kind, 6, 2, "multi-chain", places=places) as rig:
        rig.start()
        reports = {report.node: report for report in await rig.reports()}
    domain_of = {f"n{index}": domain for index, (_, domain) in enumerate(places)}
    for domain, senders in (("x", {"n0", "n1"}), ("y", {"n2", "n3"})):
        entered = Counter[str]()
        for node, report in reports.items():
            if domain_of[node] != domain:
                continue
            over_network = {peer: n for peer, n in report.bytes_by_peer.items() if domain_of[peer] != domain}
            assert len(over_network) == 1 and over_network.keys() <= senders
            entered.update(over_network)
        # One copy enters each domain, each port with its own part.
        assert sum(entered.values()) == NBYTES and set(entered) == senders


@pytest.mark.parametrize("kind", [*KINDS, "shm"])
async def test_a_node_that_returns_pulls_only_what_it_lacks(kind: str) -> None:
    async with make_rig(kind, 3) as rig:
        kept = [0, 3, 4, BLOCKS - 1]
        for block in kept:
            start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, NBYTES)
            rig.nodes[2].buffer[start:end] = CONTENT[start:end]
        rig.start(1)
        report = await rig.cast(2, held=kept).run()
        assert rig.nodes[2].buffer == CONTENT
        assert report.nbytes == NBYTES - 3 * BLOCK_BYTES - 123
        await rig.reports()


@pytest.mark.parametrize("kind", [*KINDS, "shm"])
async def test_a_node_that_joins_late_gets_everything(kind: str) -> None:
    async with make_rig(kind, 5, planner="chain") as rig:
        rig.start(1, 2, 3)
        await rig.reports()
        rig.start(4)
        await rig.reports()


@pytest.mark.parametrize("kind", [*KINDS, "shm"])
async def test_a_source_that_still_loads_gives_what_it_has(kind: str) -> None:
    async with make_rig(kind, 3, loaded=10) as rig:
        rig.start()
        await rig.holds(2, 10)
        rig.nodes[0].region.mark(10 * BLOCK_BYTES, 5)
        assert rig.nodes[2].region.bitfield(BLOCK_BYTES).held.bit_count() == 10
        rig.finish_loading()
        await rig.reports()
