"""A node's own part of a plan is what the whole plan says."""

import time

import pytest

from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.own_part import own_part

QUICK = ("binomial", "chain", "multi-chain")  # which the automatic planner chooses from


@pytest.mark.parametrize("planner", list(PLANNERS))
def test_the_own_part_is_that_of_the_plan(planner: str) -> None:
    sizes = [*range(2, 20), 31, 32, 33, 63, 100] if planner in QUICK else [2, 5, 12]
    for nodes in sizes:
        for sources in {1, min(3, nodes - 1), nodes // 2 + 1} - {nodes}:
            for blocks in (1, 2, 3, 7, 16):
                shape = CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks)
                plan = PLANNERS[planner].plan(shape)
                for node in range(nodes):
                    part = plan.receives(node)
                    whole = tuple(zip(part.source.tolist(), part.block.tolist(), strict=True))
                    assert own_part(planner, shape, node) == whole, (shape, node)


def test_sources_may_stand_anywhere() -> None:
    shape = CastShape(nodes=11, sources=(7, 2), blocks=9)
    for name, planner in PLANNERS.items():
        plan = planner.plan(shape)
        for node in range(11):
            part = plan.receives(node)
            assert own_part(name, shape, node) == tuple(
                zip(part.source.tolist(), part.block.tolist(), strict=True)
            )


@pytest.mark.parametrize("sources", [1, 8])
@pytest.mark.parametrize("planner", QUICK)
def test_of_1024_nodes_and_512_blocks_it_takes_less_than_ten_milliseconds(planner: str, sources: int) -> None:
    """Processor time, the least of three. A node works it out on its event loop, before its first pull."""
    shape = CastShape(nodes=1024, sources=tuple(range(sources)), blocks=512)
    for node in (sources, 500, 1023):
        taken_s = []
        for _ in range(3):
            began_s = time.process_time()
            assert len(own_part(planner, shape, node)) == 512
            taken_s.append(time.process_time() - began_s)
        assert min(taken_s) < 0.01
