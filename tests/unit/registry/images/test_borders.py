"""The blocks of an image in which layers begin, and casts whose block orders begin there."""

from hypothesis import given
from hypothesis import strategies as st

from rdmacast.cast.record import CastMember
from rdmacast.cast.spec import CastSpec
from registry.images.manifest import layer_borders
from tests.fixtures.cast import cast_plan
from tests.fixtures.registry_records import manifest


def test_the_block_that_a_layer_begins_in_belongs_to_it() -> None:
    found = manifest(("embed", 0, "", 35), *(("layer", i, "", 20) for i in range(4)), ("head", 4, "", 35))
    assert layer_borders(found, 10) == (0, 5, 7, 9)  # layers begin at 55, 75 and 95
    assert layer_borders(found, 5) == (0, 11, 15, 19)
    assert layer_borders(found, 1000) == (0,)


def test_parts_without_bytes_have_no_border_and_each_tower_begins_with_its_embedding() -> None:
    towers = [
        one
        for tower in ("text", "vision")
        for one in (
            ("embed", 0, tower, 10),
            ("layer", 0, tower, 20),
            ("layer", 1, tower, 20),
            ("head", 2, tower, 0),
        )
    ]
    assert layer_borders(manifest(*towers), 10) == (0, 3, 5, 8)
    assert layer_borders(manifest(("layer", 0, "", 20), ("layer", 1, "", 0), ("layer", 2, "", 20)), 10) == (
        2,
    )


def test_a_nodes_part_in_a_cast_begins_with_a_whole_layer() -> None:
    found = manifest(("embed", 0, "", 35), *(("layer", i, "", 20) for i in range(4)), ("head", 4, "", 35))
    members = [CastMember(node=f"n{i}", host="h", address=f"tcp://n{i}:1") for i in range(6)]
    plan = cast_plan(members, nbytes=found.nbytes, block_bytes=10, planner="chain", sources=2)
    spec = CastSpec(plan=plan, borders=layer_borders(found, 10))
    orders = [spec.order(node) for node in range(2, 6)]
    assert sorted({order[0][1] for order in orders if order}) == [0, 7]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 60))
def test_they_are_ascending_blocks_of_the_image(sizes: list[int], block_bytes: int) -> None:
    found = manifest(*(("layer", index, "", nbytes) for index, nbytes in enumerate(sizes)))
    borders = layer_borders(found, block_bytes)
    assert list(borders) == sorted(set(borders))
    assert all(0 <= border < -(-found.nbytes // block_bytes) for border in borders)
