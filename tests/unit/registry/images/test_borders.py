"""The blocks of an image in which layers begin, and casts whose block orders begin there."""

from hypothesis import given
from hypothesis import strategies as st

from rdmacast.cast.record import CastMember, CastPlan
from rdmacast.cast.spec import CastSpec
from registry.images.manifest import MANIFEST_FORMAT, LayerSpan, Manifest, layer_borders


def manifest(*spans: tuple[str, int, str, int]) -> Manifest:
    """Spans (kind, index, tower, bytes), one behind the other."""
    layers, end = [], 0
    for kind, index, tower, nbytes in spans:
        layers.append(LayerSpan(kind=kind, index=index, tower=tower, start=end, end=end + nbytes))
        end += nbytes
    return Manifest(
        format=MANIFEST_FORMAT,
        architecture="test",
        model_type="test",
        tied_head=False,
        num_layers=sum(span.kind == "layer" for span in layers),
        nbytes=end,
        sha256="0" * 64,
        tensors=(),
        layers=tuple(layers),
        units=b"",
    )


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
    plan = CastPlan(
        cast_id="c1",
        image=found.sha256,
        nbytes=found.nbytes,
        planner="chain",
        block_bytes=10,
        members=tuple(CastMember(node=f"n{i}", host="h", address=f"tcp://n{i}:1") for i in range(6)),
        sources=(0, 1),
        planned=6,
    )
    spec = CastSpec(plan=plan, borders=layer_borders(found, 10))
    orders = [spec.order(node) for node in range(2, 6)]
    assert sorted({order[0][1] for order in orders if order}) == [0, 7]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 60))
def test_they_are_ascending_blocks_of_the_image(sizes: list[int], block_bytes: int) -> None:
    found = manifest(*(("layer", index, "", nbytes) for index, nbytes in enumerate(sizes)))
    borders = layer_borders(found, block_bytes)
    assert list(borders) == sorted(set(borders))
    assert all(0 <= border < -(-found.nbytes // block_bytes) for border in borders)
