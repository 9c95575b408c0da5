"""Loading orders of nodes that have the model in host memory, and layers from manifests."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model_layers import ModelLayers, NotLayered, even_layers, layers_of
from gateway.warm_orders import ColdGroups, warm_orders
from registry.images.manifest import LayerSpan, Manifest

EVEN = even_layers(40)


def test_warm_nodes_divide_the_layers() -> None:
    orders = warm_orders(EVEN, 4)
    assert (orders.first_layers, orders.share) == ((0, 10, 20, 30), 0.25)
    assert orders.reason == "4 warm nodes divide the layers"
    assert orders.order(1, 40) == (*range(10, 40), *range(10))


def test_with_a_cast_they_begin_with_what_it_brings_last() -> None:
    even = warm_orders(EVEN, 1, 1.0, ColdGroups(groups=1, rate=1.0))
    assert (even.first_layers, even.share) == ((20,), 0.5)
    assert even.reason == "1 warm nodes and 1 sub-groups divide the layers"
    quicker = warm_orders(EVEN, 1, 3.0, ColdGroups(groups=1, rate=1.0))
    assert (quicker.first_layers, quicker.share) == ((10,), 0.75)  # the cast brings a quarter meanwhile
    two = warm_orders(EVEN, 2, 1.0, ColdGroups(groups=2, rate=1.0))
    assert (two.first_layers, two.share) == ((10, 30), 0.25)


def test_where_the_cast_is_slow_they_go_by_themselves() -> None:
    orders = warm_orders(EVEN, 3, 1.0, ColdGroups(groups=4, rate=0.01))
    assert orders.first_layers == (0, 13, 27) and orders.share == 1 / 3


def test_layers_that_cost_more_make_shorter_parts() -> None:
    layers = ModelLayers(needs=(1, 2, 4, 8), costs=(3.0, 1.0, 1.0, 1.0))
    assert warm_orders(layers, 2).first_layers == (0, 1)


@given(
    warm=st.integers(1, 12),
    rate=st.floats(0.1, 10.0),
    groups=st.integers(0, 5),
    cold_rate=st.floats(0.0, 10.0),
)
def test_all_layers_are_there_by_the_share_that_is_told(
    warm: int, rate: float, groups: int, cold_rate: float
) -> None:
    layers = even_layers(240)
    orders = warm_orders(layers, warm, rate, ColdGroups(groups=groups, rate=cold_rate))
    assert 0 < orders.share <= 1 / warm
    loaded = round(orders.share * 240) + 2  # a part ends within a layer
    meanwhile = round(orders.share * 240 / rate * cold_rate) + 2
    held = {layer for node in range(warm) for layer in orders.order(node, 240)[:loaded]}
    for group in range(groups):
        held |= {(group * 240 // groups + step) % 240 for step in range(meanwhile)}
    assert held == set(range(240))


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="0 warm nodes"):
        warm_orders(EVEN, 0)
    with pytest.raises(ValueError, match="2 layers and 1 costs"):
        ModelLayers(needs=(1, 2), costs=(1.0,))
    with pytest.raises(ValueError, match="must cost"):
        ModelLayers(needs=(1,), costs=(0.0,))


def manifest(*, tied: bool) -> Manifest:
    """An embedding of 250 bytes, three layers of 400, a norm of 10, and a head of 240 unless it is tied."""
    edges = [0, 250, 650, 1050, 1450, 1460 if tied else 1700]
    kinds = [("embed", 0), ("layer", 0), ("layer", 1), ("layer", 2), ("head", 0)]
    spans = tuple(
        LayerSpan(kind=kind, index=index, tower="", start=edges[place], end=edges[place + 1])
        for place, (kind, index) in enumerate(kinds)
    )
    return Manifest(
        format=1,
        architecture="LlamaForCausalLM",
        model_type="llama",
        tied_head=tied,
        num_layers=3,
        nbytes=edges[-1],
        sha256="0" * 64,
        tensors=(),
        layers=spans,
        units=b"",
    )


def test_embedding_and_head_go_with_the_outer_layers() -> None:
    layers = layers_of(manifest(tied=False), 100)
    assert layers.needs == (0b1111111, 0b11111000000, 0b11111110000000000)
    assert layers.costs == (400.0, 400.0, 650.0)
    assert layers.all_blocks == (1 << 17) - 1


def test_a_tied_head_costs_the_first_layer_and_its_norm_is_the_last_ones() -> None:
    layers = layers_of(manifest(tied=True), 100)
    assert layers.needs == (0b1111111, 0b11111000000, 0b111110000000000)
    assert layers.costs == (400.0 + 250, 400.0, 400.0 + 10)
    told = layers_of(manifest(tied=True), 100, costs=(3.0, 1.0, 1.0))
    assert told.costs == (3.0, 1.0, 1.0)


def test_runs_of_layers_end_where_a_block_is_missing() -> None:
    layers = layers_of(manifest(tied=False), 100)
    assert layers.ends(layers.all_blocks) == (3, 3, 3)
    assert layers.ends(0) == (0, 1, 2)
    assert layers.ends(layers.all_blocks & ~(1 << 8)) == (1, 1, 3)


def test_two_towers_are_no_row_of_layers() -> None:
    one = manifest(tied=False)
    two = replace(one, layers=(*one.layers, LayerSpan(kind="layer", index=0, tower="vision", start=0, end=9)))
    with pytest.raises(NotLayered):
        layers_of(two, 100)
    with pytest.raises(NotLayered):
        layers_of(replace(one, layers=()), 100)
