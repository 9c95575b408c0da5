"""A planner set for all casts."""

from dataclasses import replace

import pytest

from gateway.core.fixed_plan import FixedPlan, parse_fixed_plan
from gateway.core.settings import parse
from registry.errors import InvalidRecord
from registry.images.manifest import UNIT_BYTES
from tests.fixtures.registry_records import cast

CAST = cast(nbytes=100 * UNIT_BYTES - 7, block_bytes=4 * UNIT_BYTES, edge=(2,))


def test_a_cast_is_planned_as_told() -> None:
    reported = FixedPlan(planner="chain", blocks=50).apply(CAST, 1e9)
    assert (reported.planner, reported.block_bytes, reported.edge) == ("chain", 2 * UNIT_BYTES, ())
    assert reported.reason == "chain, set by --cast-planner" and reported.members == CAST.members
    assert FixedPlan(planner="tree").apply(CAST, 1e9).block_bytes == CAST.block_bytes
    assert (
        FixedPlan(planner="tree", blocks=5000).apply(CAST, 1e9).block_bytes == UNIT_BYTES
    )  # blocks are whole units


def test_large_blocks_of_a_binomial_pipeline_come_in_turn() -> None:
    slow = CAST.block_bytes / 0.1
    assert FixedPlan(planner="binomial").apply(CAST, slow).in_slots
    assert not FixedPlan(planner="binomial").apply(CAST, 1e9).in_slots
    assert not FixedPlan(planner="chain").apply(replace(CAST, in_slots=True), slow).in_slots


def test_scattered_parts_come_one_after_the_other() -> None:
    assert FixedPlan(planner="scatter-allgather").apply(CAST, 1e9).in_slots


def test_spellings() -> None:
    assert parse_fixed_plan("tree") == FixedPlan(planner="tree")
    assert parse_fixed_plan("chain/512") == FixedPlan(planner="chain", blocks=512)
    for bad in ("ring", "chain/", "chain/0", "chain/x", "", "chain/1000000"):
        with pytest.raises(InvalidRecord, match="use one of binomial"):
            parse_fixed_plan(bad)
    argv = ["--redis-url", "unix:///none", "--store", "/none", "--cast-planner", "tree/64"]
    assert parse(argv, {"HYPERCAST_CLUSTER_SECRET": "x" * 32}).cast_plan == FixedPlan(
        planner="tree", blocks=64
    )
