"""Covers of all layers by nodes that hold some: fewest hops, then balance, against trying everything."""

import itertools
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.live.model_layers import ModelLayers
from gateway.live.stage_cover import StageCandidate, StageCover, fewest_hops, most_even


@st.composite
def scenes(draw: st.DrawFn) -> tuple[ModelLayers, list[StageCandidate]]:
    count = draw(st.integers(1, 6))
    costs = draw(st.lists(st.integers(1, 5).map(float), min_size=count, max_size=count))
    layers = ModelLayers(needs=tuple(1 << layer for layer in range(count)), costs=tuple(costs))
    candidates = [
        StageCandidate(
            node=f"n{index}",
            group=draw(st.integers(0, 2)),
            ends=layers.ends(draw(st.integers(0, (1 << count) - 1))),
            speed=draw(st.sampled_from([1.0, 1.0, 2.0])),
        )
        for index in range(draw(st.integers(0, 5)))
    ]
    return layers, candidates


def check(layers: ModelLayers, candidates: list[StageCandidate], cover: StageCover) -> None:
    """Each layer once, in order, by a node that holds it and is there once."""
    by_name = {candidate.node: candidate for candidate in candidates}
    edges = [0, *(stage.last for stage in cover.stages)]
    assert [stage.first for stage in cover.stages] == edges[:-1] and edges[-1] == len(layers)
    assert len(set(cover.nodes)) == len(cover.nodes)
    for stage in cover.stages:
        assert stage.first < stage.last <= by_name[stage.node].ends[stage.first]
    assert cover.slowest == slowest(layers, by_name, cover.nodes, edges)


def slowest(
    layers: ModelLayers, by_name: dict[str, StageCandidate], nodes: tuple[str, ...], edges: list[int]
) -> float:
    return max(
        (layers.until[last] - layers.until[first]) / by_name[node].speed
        for node, (first, last) in zip(nodes, itertools.pairwise(edges), strict=True)
    )


def best_of_all(layers: ModelLayers, candidates: list[StageCandidate]) -> dict[int, float]:
    """By number of stages the least that the costliest stage can cost: all orders, all borders."""
    best: dict[int, float] = {}
    by_name = {candidate.node: candidate for candidate in candidates}
    for hops in range(1, min(len(candidates), len(layers)) + 1):
        for nodes in itertools.permutations(by_name, hops):
            for inner in itertools.combinations(range(1, len(layers)), hops - 1):
                edges = [0, *inner, len(layers)]
                pairs = zip(nodes, itertools.pairwise(edges), strict=True)
                if all(by_name[node].ends[first] >= last for node, (first, last) in pairs):
                    cost = slowest(layers, by_name, nodes, edges)
                    best[hops] = min(best.get(hops, inf), cost)
    return best


@given(scene=scenes(), most=st.integers(1, 5))
@settings(max_examples=300)
def test_covers_are_the_best_there_are(scene: tuple[ModelLayers, list[StageCandidate]], most: int) -> None:
    layers, candidates = scene
    best = {hops: cost for hops, cost in best_of_all(layers, candidates).items() if hops <= most}
    fewest, even = fewest_hops(layers, candidates, most), most_even(layers, candidates, most)
    assert (fewest is None) == (even is None) == (not best)
    if fewest is None or even is None:
        return
    check(layers, candidates, fewest)
    check(layers, candidates, even)
    assert len(fewest.stages) == min(best)
    assert fewest.slowest <= best[min(best)] * 1.001
    assert even.slowest <= min(best.values()) * 1.001


def names(cover: StageCover | None) -> list[tuple[str, int, int]]:
    assert cover is not None
    return [(stage.node, stage.first, stage.last) for stage in cover.stages]


def test_other_groups_come_first_and_those_that_hold_least() -> None:
    layers = ModelLayers(needs=(1, 2, 4, 8), costs=(1.0,) * 4)
    low, high, most = layers.ends(0b0011), layers.ends(0b1100), layers.ends(0b1110)
    candidates = [
        StageCandidate(node="a0", group=0, ends=low),
        StageCandidate(node="a1", group=0, ends=high),
        StageCandidate(node="b1", group=1, ends=most),
        StageCandidate(node="b2", group=1, ends=high),
    ]
    assert names(fewest_hops(layers, candidates, 8)) == [("a0", 0, 2), ("b2", 2, 4)]


def test_borders_lie_where_costs_are_alike() -> None:
    layers = ModelLayers(needs=(1, 2, 4, 8), costs=(1.0, 1.0, 1.0, 3.0))
    everything = layers.ends(0b1111)
    pair = [StageCandidate(node=name, group=0, ends=layers.ends(0b1111)) for name in "ab"]
    even = most_even(layers, pair, 2)
    assert even is not None and even.slowest == 3.0 and [stage.last for stage in even.stages] == [3, 4]
    quick = StageCandidate(node="q", group=1, ends=everything, speed=5.0)
    found = most_even(layers, [*pair, quick], 2)
    assert found is not None and found.slowest == 1.0 and "q" in found.nodes


def test_many_layers_and_nodes_take_few_tries() -> None:
    """Eighty layers, of which each node lacks some: the search gives up rather than trying all orders."""
    layers = ModelLayers(needs=tuple(1 << layer for layer in range(80)), costs=(1.0,) * 80)
    scattered = [
        StageCandidate(
            node=f"n{index}",
            group=index % 4,
            ends=layers.ends(sum(1 << layer for layer in range(80) if (layer * 7 + index) % 16 < 9)),
        )
        for index in range(60)
    ]
    cover = fewest_hops(layers, scattered, 16)
    if cover is not None:
        check(layers, scattered, cover)
    assert fewest_hops(layers, scattered, 2) is None
