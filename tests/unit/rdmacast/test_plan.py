"""Plans of every planner: the law, the step counts, the pipelines."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rdmacast.errors import PlanError
from rdmacast.plan.pipelines import pipelines
from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import PLANNERS, bound
from rdmacast.plan.planners.subgroups import balanced, shifted_orders
from rdmacast.plan.transfers import Transfers, ints

NAMES = tuple(PLANNERS)


def shape_of(nodes: int, blocks: int, sources: int = 1) -> CastShape:
    return CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks)


@st.composite
def shapes(draw: st.DrawFn, most_nodes: int = 130, most_blocks: int = 64) -> CastShape:
    nodes = draw(st.integers(1, most_nodes))
    k = draw(st.integers(1, max(1, min(8, nodes - 1))))
    sources = draw(st.permutations(range(nodes)))[:k] if nodes <= 16 else range(k)
    return CastShape(nodes=nodes, sources=tuple(sources), blocks=draw(st.integers(1, most_blocks)))


def log2_up(count: int) -> int:
    return (count - 1).bit_length()


def tree_depth(members: int) -> int:
    """Return the cost of the longest path down: a first child costs 1, a second 2."""
    costs = [0]
    for node in range(1, members):
        costs.append(costs[(node - 1) // 2] + (1 if node % 2 else 2))
    return max(costs)


# As written down for L nodes and b blocks, of the largest sub-group; the others have a test of their own.
CLOSED_FORMS: dict[str, Callable[[int, int], int]] = {
    "binomial": lambda members, blocks: blocks + log2_up(members) - 1,
    "chain": lambda members, blocks: blocks + members - 2,
    "multi-chain": lambda members, blocks: blocks + members - 2,
    "tree": lambda members, blocks: 2 * (blocks - 1) + tree_depth(members) if members > 2 else blocks,
    "binomial-tree": lambda members, blocks: blocks * log2_up(members),
    "sequential": lambda members, blocks: blocks * (members - 1),
}


@pytest.mark.parametrize("name", NAMES)
@given(shape=shapes())
@settings(max_examples=40)
def test_plans_are_valid_and_take_the_steps_of_their_closed_forms(name: str, shape: CastShape) -> None:
    plan = PLANNERS[name].plan(shape)
    plan.validate()
    assert len(plan.transfers) == shape.transfers
    assert plan.steps == PLANNERS[name].steps(shape) >= bound(shape)
    sizes = sorted(map(len, plan.groups))
    assert sizes[-1] - sizes[0] <= 1 and tuple(group[0] for group in plan.groups) == shape.sources
    if name in CLOSED_FORMS and shape.nodes > 1:
        assert plan.steps == CLOSED_FORMS[name](sizes[-1], shape.blocks)


@given(shape=shapes())
@settings(max_examples=120)
def test_the_binomial_pipeline_takes_the_fewest_steps_that_can_be(shape: CastShape) -> None:
    plan = PLANNERS["binomial"].plan(shape)
    plan.validate()
    largest = -(-shape.nodes // len(shape.sources))
    expected = shape.blocks + log2_up(largest) - 1 if shape.nodes > 1 else 0
    assert plan.steps == bound(shape) == expected


@given(st.integers(1, 16), st.integers(1, 8))
@settings(max_examples=40)
def test_scatter_and_allgather_take_twice_the_blocks_less_ones_own(members: int, part: int) -> None:
    steps = PLANNERS["scatter-allgather"].plan(shape_of(members, members * part)).steps
    assert steps == 2 * part * (members - 1)


def test_step_counts_with_8_and_64_nodes_are_known() -> None:
    counts = {
        (name, nodes): planner.plan(shape_of(nodes, 16)).steps
        for name, planner in PLANNERS.items()
        for nodes in (8, 64)
    }
    assert [counts[name, 8] for name in ("binomial", "chain", "tree", "scatter-allgather")] == [
        18,
        22,
        34,
        28,
    ]
    assert [counts[name, 64] for name in ("binomial", "chain", "tree")] == [21, 78, 40]
    assert [counts["binomial-tree", nodes] for nodes in (8, 64)] == [48, 96]
    assert [counts["sequential", nodes] for nodes in (8, 64)] == [112, 1008]


@given(st.integers(0, 200), st.integers(1, 40))
def test_parts_are_balanced_and_each_order_begins_with_its_part(items: int, parts: int) -> None:
    ranges = balanced(items, parts)
    sizes = [last - first for first, last in ranges]
    assert ranges[0][0] == 0 and ranges[-1][1] == items and max(sizes) - min(sizes) <= 1
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    if items:
        for (first, last), order in zip(ranges, shifted_orders(parts, items), strict=True):
            assert sorted(order) == list(range(items))
            assert list(order[: last - first]) == list(range(first, last))


@pytest.mark.parametrize("name", NAMES)
@given(shape=shapes(most_nodes=40))
@settings(max_examples=25)
def test_pipelines_hold_each_target_once_and_everything_by_then(name: str, shape: CastShape) -> None:
    plan = PLANNERS[name].plan(shape)
    arrived = plan.arrivals()
    formed = pipelines(plan)
    assert sorted(node for pipeline in formed for node in pipeline.nodes) == sorted(shape.targets)
    for pipeline in formed:
        held = zip(pipeline.nodes, pipeline.chunks, strict=True)
        last_steps = [int(arrived[node, first:last].max()) for node, (first, last) in held]
        assert max(last_steps) == pipeline.ready_step <= plan.steps
        assert all(first < last for first, last in pipeline.chunks)
        assert [*itertools.chain(*map(range, *zip(*pipeline.chunks, strict=True)))] == list(
            range(shape.blocks)
        )


@given(shape=shapes())
@settings(max_examples=80)
def test_the_first_pipeline_across_subgroups_comes_early(shape: CastShape) -> None:
    plan = PLANNERS["binomial"].plan(shape)
    assume(shape.targets)
    # Where sources outnumber targets, only as many chunks go out as there are targets to take them.
    chunks = min(len(shape.sources), len(shape.targets))
    largest = -(-shape.nodes // len(shape.sources))
    # By then each block is somewhere among the targets.
    union = int(plan.arrivals()[list(shape.targets)].min(axis=0).max())
    assert union == -(-shape.blocks // chunks)
    first = pipelines(plan)[0]
    assert union <= first.ready_step <= union + log2_up(largest)
    assert len(first.nodes) == min(chunks, shape.blocks) or len(shape.sources) == 1


def test_pipelines_of_four_sources_and_64_nodes_are_ready_early() -> None:
    shape = shape_of(64, 64, sources=4)
    steps = [pipeline.ready_step for pipeline in pipelines(PLANNERS["binomial"].plan(shape))]
    assert (steps[0], steps[-1], len(steps)) == (19, 20, 15)
    chained = [pipeline.ready_step for pipeline in pipelines(PLANNERS["chain"].plan(shape))]
    assert (chained[0], chained[-1]) == (16, 16 + 16 - 2)


def is_lawful(plan: TransferPlan) -> bool:
    """Check the rules of plans again, in plain sets."""
    shape, moved = plan.shape, plan.transfers
    held = {(source, block) for source in shape.sources for block in range(shape.blocks)}
    rows = list(zip(moved.step, moved.source, moved.target, moved.block, strict=True))
    for _, together in itertools.groupby(rows, key=lambda row: row[0]):
        step = list(together)
        sends, receives = [row[1] for row in step], [row[2] for row in step]
        if len(set(sends)) < len(sends) or len(set(receives)) < len(receives):
            return False
        if any((source, block) not in held for _, source, _, block in step):
            return False
        if any((target, block) in held for _, _, target, block in step):
            return False
        held.update((target, block) for _, _, target, block in step)
    return len(held) == shape.nodes * shape.blocks


def changed(plan: TransferPlan, transfers: Transfers) -> TransferPlan:
    return TransferPlan(
        planner=plan.planner, shape=plan.shape, groups=plan.groups, transfers=transfers.in_order()
    )


MUTATIONS = ("drop", "double", "delay", "hurry", "swap", "redirect", "other source", "other block")


@given(
    name=st.sampled_from([name for name in NAMES if name != "binomial-tree"]),
    shape=shapes(most_nodes=12, most_blocks=8),
    mutation=st.sampled_from(MUTATIONS),
    data=st.data(),
)
@settings(max_examples=150)
def test_a_plan_is_refused_exactly_if_it_breaks_the_law(
    name: str, shape: CastShape, mutation: str, data: st.DataObject
) -> None:
    plan = PLANNERS[name].plan(shape)
    assume(len(plan.transfers) > 0)
    index = data.draw(st.integers(0, len(plan.transfers) - 1))
    moved = plan.transfers
    columns = {name: getattr(moved, name).copy() for name in ("step", "source", "target", "block")}
    if mutation == "drop":
        columns = {name: np.delete(column, index) for name, column in columns.items()}
    elif mutation == "double":
        columns = {name: np.append(column, column[index]) for name, column in columns.items()}
        columns["step"][-1] = data.draw(st.integers(0, plan.steps))
    elif mutation == "delay":
        columns["step"][index] += data.draw(st.integers(1, 3))
    elif mutation == "hurry":
        columns["step"][index] = max(0, columns["step"][index] - data.draw(st.integers(1, 3)))
    elif mutation == "swap":
        other = data.draw(st.integers(0, len(moved) - 1))
        columns["step"][[index, other]] = columns["step"][[other, index]]
    else:
        column = {"redirect": "target", "other source": "source", "other block": "block"}[mutation]
        most = shape.blocks if column == "block" else shape.nodes
        columns[column][index] = data.draw(st.integers(0, most - 1))
    broken = changed(plan, Transfers(**columns))
    assume(not np.any(broken.transfers.source == broken.transfers.target))
    if is_lawful(broken):
        broken.validate()
        return
    with pytest.raises(PlanError):
        broken.validate()


def three_nodes(*rows: tuple[int, int, int, int], blocks: int = 1, whole: bool = False) -> TransferPlan:
    columns = [ints(column) for column in zip(*rows, strict=True)]
    return TransferPlan(
        planner="test",
        shape=shape_of(3, blocks),
        groups=((0, 1, 2),),
        transfers=Transfers(*columns),
        whole=whole,
    )


@pytest.mark.parametrize(
    ("rows", "blocks", "words", "at"),
    [
        (((0, 0, 1, 0), (0, 0, 2, 0)), 1, "sends more than one block", (0, 0, 0)),
        (((0, 0, 1, 0), (1, 0, 1, 1), (1, 2, 1, 0)), 2, "a block that it lacks", (1, 2, 0)),
        (((0, 0, 1, 0), (0, 1, 2, 0)), 1, "a block that it lacks", (0, 1, 0)),
        (((0, 0, 1, 0), (1, 1, 2, 0), (2, 0, 2, 0)), 1, "received the block before", (2, 2, 0)),
        (((0, 0, 1, 0), (1, 1, 2, 0), (1, 0, 2, 1), (2, 0, 1, 1)), 2, "receives more than one", (1, 2, 1)),
        (((0, 0, 1, 0), (1, 1, 0, 0)), 1, "holds the block from the start", (1, 0, 0)),
        (((0, 0, 3, 0),), 1, "no such target", (0, 3, 0)),
        (((0, 0, 1, 5),), 1, "no such block", (0, 0, 5)),
        (((-1, 0, 1, 0),), 1, "no such step", (-1, 0, 0)),
        (((0, 0, 1, 0),), 1, "node 2 never gets block 0", (None, 2, 0)),
    ],
)
def test_refusals_name_step_node_and_block(
    rows: tuple[tuple[int, int, int, int], ...],
    blocks: int,
    words: str,
    at: tuple[int | None, int, int],
) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        three_nodes(*rows, blocks=blocks).validate()
    assert (refused.value.step, refused.value.node, refused.value.block) == at


def test_with_whole_only_complete_nodes_send() -> None:
    rows = ((0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 2, 0), (2, 1, 2, 1))
    three_nodes(*rows, blocks=2).validate()
    with pytest.raises(PlanError, match="before it holds the whole model") as refused:
        three_nodes(*rows, blocks=2, whole=True).validate()
    assert (refused.value.step, refused.value.node) == (1, 1)


@pytest.mark.parametrize(
    ("nodes", "sources", "blocks", "words"),
    [
        (0, (0,), 1, "1 to 65536 nodes"),
        (4, (), 1, "needs a source"),
        (4, (0, 0), 1, "only once"),
        (4, (4,), 1, "among the nodes"),
        (4, (0,), 0, "blocks"),
        (65536, (0,), 65536, "more than the"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    nodes: int, sources: tuple[int, ...], blocks: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        CastShape(nodes=nodes, sources=sources, blocks=blocks)


def test_a_nodes_own_part_is_what_the_plan_says_of_it() -> None:
    plan = PLANNERS["binomial"].plan(shape_of(13, 9, sources=2))
    parts = [plan.receives(node) for node in range(13)]
    assert sum(map(len, parts)) == len(plan.transfers) == sum(len(plan.sends(node)) for node in range(13))
    assert all(sorted(part.block) == list(range(9)) for part in parts[2:]) and not len(parts[0])
    assert all(np.all(np.diff(part.step) > 0) for part in parts)


def test_a_plan_for_a_thousand_nodes_is_small_and_takes_no_pass_over_each_transfer() -> None:
    plan = PLANNERS["binomial"].plan(shape_of(1000, 512))
    moved = plan.transfers
    assert plan.steps == 512 + 10 - 1
    assert sum(column.nbytes for column in (moved.step, moved.source, moved.target, moved.block)) < 10 << 20
    assert repr(plan) == "TransferPlan(binomial: 1 of 1000 nodes, 512 blocks, 521 steps)"
