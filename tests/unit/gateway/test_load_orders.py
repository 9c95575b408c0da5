"""Loading orders of nodes that have the model in host memory, and layers from manifests."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.live.load_orders import layer_at, warm_places
from gateway.live.model_layers import ModelLayers, NotLayered, layers_of
from registry.images.manifest import LayerSpan, Manifest
from tests.fixtures.registry_records import manifest


def test_warm_nodes_divide_the_layers() -> None:
    assert warm_places(4) == (0.125, 0.375, 0.625, 0.875)
    assert warm_places(0, (0.5,)) == ()


def test_they_begin_where_the_widest_parts_are_left() -> None:
    assert warm_places(1, (0.0,)) == (0.5,)  # what a cast brings last
    assert warm_places(3, (0.125,)) == (0.375, 0.625, 0.875)  # what one that began before comes to last
    assert warm_places(2, (0.0, 0.25)) == (0.5, 0.75)
    assert warm_places(2, (0.0, 0.5)) == (0.25, 0.75)
    assert warm_places(1, (0.9, 0.3)) == (pytest.approx(0.6),)


def test_the_first_of_all_leaves_room_for_a_cast() -> None:
    assert warm_places(1) == (0.5,)
    first = warm_places(1, casts=4)
    assert first == (0.125,)
    assert warm_places(3, (*first, 0.0, 0.25, 0.5, 0.75)) == (0.375, 0.625, 0.875)


def test_layers_that_cost_more_make_shorter_parts() -> None:
    layers = ModelLayers(needs=(1, 2, 4, 8), costs=(3.0, 1.0, 1.0, 1.0))
    assert [layer_at(layers, part) for part in (0.0, 0.25, 0.5, 0.7, 0.999)] == [0, 0, 1, 2, 3]


@given(
    warm=st.integers(1, 12),
    others=st.lists(st.floats(0, 1, exclude_max=True, allow_subnormal=False), max_size=6),
    casts=st.integers(1, 8),
)
def test_no_part_is_wider_than_it_must_be(warm: int, others: list[float], casts: int) -> None:
    places = warm_places(warm, others, casts=casts)
    assert len(places) == warm and all(0 <= place < 1 for place in places)
    all_places = sorted({*places, *others})
    ends = [*all_places[1:], all_places[0] + 1]
    widest = max(end - start for start, end in zip(all_places, ends, strict=True))
    # One more beginning would not do: each of those between others halves a part that is as wide at least.
    known = sorted(set(others)) or [places[0]]
    gaps = [end - start for start, end in zip(known, [*known[1:], known[0] + 1], strict=True)]
    assert widest <= max(gaps)
    assert warm >= sum(ceil(gap / (widest + 1e-9)) - 1 for gap in gaps) - (not others)


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="-1 loads"):
        warm_places(-1)
    with pytest.raises(ValueError, match="1 loads beside"):
        warm_places(1, (1.0,))
    with pytest.raises(ValueError, match="2 layers and 1 costs"):
        ModelLayers(needs=(1, 2), costs=(1.0,))
    with pytest.raises(ValueError, match="must cost"):
        ModelLayers(needs=(1,), costs=(0.0,))


def model(*, tied: bool) -> Manifest:
    """Return a manifest with an embedding of 250 bytes, layers of 400, a norm of 10 and a head of 240."""
    layers = [("layer", index, "", 400) for index in range(3)]
    return manifest(("embed", 0, "", 250), *layers, ("head", 0, "", 10 if tied else 250), tied_head=tied)


def test_embedding_and_head_go_with_the_outer_layers() -> None:
    layers = layers_of(model(tied=False), 100)
    assert layers.needs == (0b1111111, 0b11111000000, 0b11111110000000000)
    assert layers.costs == (400.0, 400.0, 650.0)
    assert layers.all_blocks == (1 << 17) - 1


def test_a_tied_head_costs_the_first_layer_and_its_norm_is_the_last_ones() -> None:
    layers = layers_of(model(tied=True), 100)
    assert layers.needs == (0b1111111, 0b11111000000, 0b111110000000000)
    assert layers.costs == (400.0 + 250, 400.0, 400.0 + 10)
    given = layers_of(model(tied=True), 100, costs=(3.0, 1.0, 1.0))
    assert given.costs == (3.0, 1.0, 1.0)


def test_runs_of_layers_end_where_a_block_is_missing() -> None:
    layers = layers_of(model(tied=False), 100)
    assert layers.ends(layers.all_blocks) == (3, 3, 3)
    assert layers.ends(0) == (0, 1, 2)
    assert layers.ends(layers.all_blocks & ~(1 << 8)) == (1, 1, 3)


def test_two_towers_are_no_row_of_layers() -> None:
    one = model(tied=False)
    two = replace(one, layers=(*one.layers, LayerSpan(kind="layer", index=0, tower="vision", start=0, end=9)))
    with pytest.raises(NotLayered):
        layers_of(two, 100)
    with pytest.raises(NotLayered):
        layers_of(replace(one, layers=()), 100)
