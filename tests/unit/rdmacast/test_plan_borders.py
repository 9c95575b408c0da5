"""Block orders that begin at borders of layers: what a plan promises holds, and layers come whole early."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.cast.record import CastMember
from rdmacast.cast.spec import CastSpec
from rdmacast.plan.pipelines import pipelines
from rdmacast.plan.plan import CastShape
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.planners.own_part import own_part
from rdmacast.plan.planners.subgroups import balanced, begins, chunks, shifted_orders
from rdmacast.stragglers.slow_nodes import order_around
from tests.fixtures.cast import cast_plan


@st.composite
def bordered(draw: st.DrawFn, most_nodes: int = 40, most_blocks: int = 40) -> CastShape:
    nodes = draw(st.integers(2, most_nodes))
    blocks = draw(st.integers(1, most_blocks))
    borders = draw(st.sets(st.integers(0, blocks - 1), max_size=12))
    k = draw(st.integers(1, min(8, nodes - 1)))
    return CastShape(nodes=nodes, sources=tuple(range(k)), blocks=blocks, borders=tuple(sorted(borders)))


def longest(starts: Sequence[int], blocks: int) -> int:
    return max(after - before for before, after in pairwise((*starts, blocks)))


@given(st.integers(1, 12), st.integers(1, 60), st.data())
def test_parts_begin_at_different_borders(parts: int, blocks: int, data: st.DataObject) -> None:
    borders = tuple(sorted(data.draw(st.sets(st.integers(0, blocks - 1), max_size=20))))
    even = tuple(first for first, _ in balanced(blocks, parts))
    found = begins(parts, blocks, borders)
    known = (0, *(border for border in borders if border), blocks)
    if len(known) <= parts:
        assert found == even
    else:
        assert found[0] == 0 and set(found) <= set(known[:-1]) and len(found) == parts
        assert all(before < after for before, after in pairwise(found))
        # Else a part goes on to the end of what it was cut off in.
        whole = [next(border for border in known if border >= end) for end in (*even[1:], blocks)]
        assert longest(found, blocks) <= max(end - begin for begin, end in zip(even, whole, strict=True))
    ranges = chunks(parts, blocks, borders)
    assert ranges[0][0] == 0 and ranges[-1][1] == blocks
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


@given(st.integers(1, 5), st.integers(1, 25), st.data())
def test_no_choice_of_borders_has_a_shorter_longest_part(
    parts: int, blocks: int, data: st.DataObject
) -> None:
    borders = sorted(data.draw(st.sets(st.integers(1, blocks), max_size=8)) - {blocks})
    if len(borders) + 1 < parts:
        return
    best = min(longest((0, *some), blocks) for some in combinations(borders, parts - 1))
    assert longest(begins(parts, blocks, borders), blocks) == best


def test_of_choices_as_good_it_is_the_one_near_to_balanced() -> None:
    assert begins(2, 30, (5, 10, 14, 21)) == (0, 14)
    assert begins(3, 30, (9, 10, 11, 21)) == (0, 10, 21)  # from 9 on the second would take 12
    assert begins(3, 40, (20, 24, 27, 30)) == (0, 20, 27)  # one takes 20 in any case


@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 4))
def test_layers_of_like_size_are_shared_out_evenly(parts: int, layers: int, size: int) -> None:
    if layers < parts:
        return
    ranges = chunks(parts, layers * size, tuple(range(0, layers * size, size)))
    counts = [(last - first) // size for first, last in ranges]
    assert sum(counts) == layers and max(counts) <= -(-layers // parts)


@given(st.integers(1, 8), st.integers(1, 40))
def test_without_borders_all_is_as_ever(parts: int, blocks: int) -> None:
    assert chunks(parts, blocks) == balanced(blocks, parts)
    for order, (first, _) in zip(shifted_orders(parts, blocks), balanced(blocks, parts), strict=True):
        assert [*order] == [*range(first, blocks), *range(first)]


@pytest.mark.parametrize("name", PLANNERS)
@given(shape=bordered())
@settings(max_examples=25)
def test_plans_are_as_valid_and_as_short_as_without_borders(name: str, shape: CastShape) -> None:
    plan = PLANNERS[name].plan(shape)
    plan.validate()
    plain = PLANNERS[name].plan(replace(shape, borders=()))
    assert plan.steps == plain.steps == PLANNERS[name].steps(shape)
    assert plan.groups == plain.groups and len(plan.transfers) == shape.transfers
    formed = pipelines(plan)
    assert sorted(node for one in formed for node in one.nodes) == sorted(shape.targets)
    assert all(first < last for one in formed for first, last in one.chunks)


@pytest.mark.parametrize("name", ["binomial", "chain", "binomial-half-turned"])
@given(shape=bordered(most_nodes=16, most_blocks=12))
@settings(max_examples=25)
def test_each_node_knows_its_own_part(name: str, shape: CastShape) -> None:
    plan = PLANNERS[name].plan(shape)
    for node in range(shape.nodes):
        part = plan.receives(node)
        whole = tuple(zip(part.source.tolist(), part.block.tolist(), strict=True))
        assert own_part(name, shape, node) == whole
        if node not in shape.sources:
            assert order_around(name, shape, (), node) == whole


@given(shape=bordered(most_nodes=100))
@settings(max_examples=60)
def test_the_first_pipeline_comes_with_the_longest_part_between_two_beginnings(shape: CastShape) -> None:
    plan = PLANNERS["binomial"].plan(shape)
    groups = min(len(shape.sources), len(shape.targets))
    most = longest(begins(groups, shape.blocks, shape.borders), shape.blocks)
    hops = (-(-shape.nodes // len(shape.sources)) - 1).bit_length()
    assert pipelines(plan)[0].ready_step <= most + hops


@pytest.mark.parametrize("layers, each, extra", [(8, 7, 0), (8, 7, 3), (12, 5, 9), (7, 4, 2)])
def test_two_sources_bring_each_layer_whole_after_little_more_than_half(
    layers: int, each: int, extra: int
) -> None:
    """An embedding of `extra` blocks, then layers: without borders the middle one comes in halves."""
    blocks = extra + layers * each
    borders = (0, *(extra + layer * each for layer in range(1, layers)))
    shape = CastShape(nodes=6, sources=(0, 1), blocks=blocks, borders=borders)
    arrived = PLANNERS["binomial"].plan(shape).arrivals()[list(shape.targets)]
    ends = (*borders[1:], blocks)
    whole = [int(arrived[:, first:last].max(axis=1).min()) for first, last in zip(borders, ends, strict=True)]
    assert max(whole) <= blocks / 2 + each / 2 + 2


def test_who_is_left_when_a_source_is_slow_begins_at_borders_too() -> None:
    shape = CastShape(nodes=9, sources=(0, 1, 2), blocks=30, borders=(0, 4, 11, 19, 26))
    firsts = {order_around("chain", shape, {1}, node)[0][1] for node in range(3, 9)}  # type: ignore[index]
    assert firsts == {0, 11}


def test_a_cast_tells_its_plan_the_borders() -> None:
    members = [CastMember(node=f"n{n}", host="h", address=f"tcp://n{n}:1") for n in range(4)]
    plan = cast_plan(members, nbytes=95, block_bytes=10, sources=2)
    spec = CastSpec(plan=plan, borders=(0, 7))
    assert spec.shape == CastShape(nodes=4, sources=(0, 1), blocks=10, borders=(0, 7))
    assert spec.order(3)[0] == (1, 7)  # type: ignore[index]


@pytest.mark.parametrize("borders", [(3, 2), (1, 1), (-1, 2), (0, 10)])
def test_borders_that_cannot_be_are_refused(borders: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="borders are ascending blocks below 10"):
        CastShape(nodes=4, sources=(0, 1), blocks=10, borders=borders)
