"""A node's own part of a plan is what the whole plan says."""

import pytest

from rdmacast.plan import CastShape
from rdmacast.planners.catalog import PLANNERS
from rdmacast.planners.own_part import own_part


@pytest.mark.parametrize("planner", list(PLANNERS))
def test_the_own_part_is_that_of_the_plan(planner: str) -> None:
    sizes = [*range(2, 20), 31, 32, 33, 63, 100] if planner in ("binomial", "chain") else [2, 5, 12]
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
