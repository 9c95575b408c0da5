"""Which nodes share an image that fits none of them, and which layers each has: pure decisions."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.planning.groups import (
    MAX_MEMBERS,
    GroupCandidate,
    GroupPart,
    LayerSizes,
    as_group,
    broken_groups,
    choose_group,
    layer_sizes,
)
from registry.images.codec import decode_manifest
from registry.images.manifest import UNIT_BYTES, layer_extent
from tests.fixtures.control import LAYERS, MIB, layered_manifest, make_instance


def sizes_of(*layers: int, head_first: bool = False) -> LayerSizes:
    """Return layers of these bytes, one after the other."""
    edges = [sum(layers[:count]) for count in range(len(layers) + 1)]
    return LayerSizes(starts=tuple(edges[:-1]), ends=tuple(edges[1:]), head_first=head_first)


def site(name: str, room: int, host: str = "", leaf: str = "", *, holds: bool = False) -> GroupCandidate:
    return GroupCandidate(node=name, host=host or f"host-{name}", leaf=leaf, room_bytes=room, holds=holds)


def nodes(parts: tuple[GroupPart, ...] | None) -> set[str]:
    assert parts is not None
    return {part.node for part in parts}


EVEN = sizes_of(*[10] * 8)


def test_the_fewest_nodes_are_taken_and_the_layers_divided_by_their_room() -> None:
    parts = choose_group(EVEN, [site("a", 100), site("b", 50), site("c", 25), site("d", 25)])
    assert nodes(parts) == {"a", "b"}
    assert {part.node: part.last - part.first for part in parts or ()} == {"a": 5, "b": 3}


def test_of_as_many_nodes_those_of_one_host_come_first_then_of_one_leaf_then_holders() -> None:
    far = [site("a", 60, leaf="x"), site("b", 60, leaf="y", holds=True), site("c", 60, leaf="z", holds=True)]
    leaf = [site("d", 55, leaf="y")]
    host = [site("e", 50, host="h"), site("f", 50, host="h")]
    assert nodes(choose_group(EVEN, [*far, *leaf, *host])) == {"e", "f"}
    assert nodes(choose_group(EVEN, [*far, *leaf])) == {"b", "d"}
    assert nodes(choose_group(EVEN, far)) == {"b", "c"}


def test_fewer_nodes_of_two_hosts_come_before_more_of_one() -> None:
    host = [site(name, 35, host="h") for name in "abc"]
    assert nodes(choose_group(EVEN, [*host, site("x", 50), site("y", 50)])) == {"x", "y"}


def test_a_large_first_layer_goes_to_the_node_with_the_room() -> None:
    parts = choose_group(sizes_of(60, 10, 10), [site("a", 30), site("b", 70)])
    assert [(part.node, part.first, part.last) for part in parts or ()] == [("b", 0, 1), ("a", 1, 3)]


def test_the_known_need_of_the_cache_counts_by_layers() -> None:
    two = [site("a", 50), site("b", 50)]
    assert choose_group(EVEN, two, kv_bytes=20) is not None
    assert choose_group(EVEN, two, kv_bytes=21) is None  # 40 bytes of layers, and 10.5 of their cache
    assert nodes(choose_group(EVEN, [*two, site("c", 30)], kv_bytes=21)) == {"a", "b", "c"}


def test_no_set_has_the_room() -> None:
    assert choose_group(EVEN, [site("a", 40), site("b", 40)]) is None
    assert choose_group(EVEN, []) is None
    assert choose_group(sizes_of(80), [site("a", 50), site("b", 50)]) is None


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12),
    st.lists(st.tuples(st.integers(1, 120), st.sampled_from("hij"), st.booleans()), max_size=7),
    st.integers(0, 60),
)
def test_each_layer_has_one_member_and_each_member_its_room(
    layers: list[int], rooms: list[tuple[int, str, bool]], kv_bytes: int
) -> None:
    sizes = sizes_of(*layers)
    sites = [site(f"n{n}", room, host=host, holds=held) for n, (room, host, held) in enumerate(rooms)]
    parts = choose_group(sizes, sites, kv_bytes)
    if parts is None:
        return
    room = {one.node: one.room_bytes for one in sites}
    assert len({part.node for part in parts}) == len(parts) and 2 <= len(parts) <= MAX_MEMBERS
    edges = [0, *(part.last for part in parts)]
    assert [part.first for part in parts] == edges[:-1] and edges[-1] == len(layers)
    for part in parts:
        assert part.first < part.last and part.image_bytes == sizes.part_bytes(part.first, part.last)
        assert sizes.need_bytes(part.first, part.last, kv_bytes) <= room[part.node]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(10, 60), st.integers(10, 60))
def test_two_nodes_that_have_the_room_form_a_group(layers: list[int], left: int, right: int) -> None:
    sizes = sizes_of(*layers)
    possible = any(
        sizes.need_bytes(0, cut, 0) <= one and sizes.need_bytes(cut, len(sizes), 0) <= other
        for cut in range(1, len(layers))
        for one, other in ((left, right), (right, left))
    )
    assert (choose_group(sizes, [site("a", left), site("b", right)]) is not None) == possible


def test_layers_are_whole_units_of_the_image_with_embedding_and_head() -> None:
    manifest = decode_manifest(layered_manifest(8 * MIB))
    sizes = layer_sizes(manifest)
    assert sizes is not None and len(sizes) == LAYERS
    assert sizes.part_bytes(0, LAYERS) == manifest.nbytes
    for first in range(LAYERS):
        for last in range(first + 1, LAYERS + 1):
            start, end = layer_extent(manifest, first, last)
            assert sizes.part_bytes(first, last) == end - start
            assert start % UNIT_BYTES == 0 and (end % UNIT_BYTES == 0 or end == manifest.nbytes)
    assert layer_extent(manifest, 0, 1)[0] == 0


def test_a_group_without_one_of_its_members_is_broken() -> None:
    parts = choose_group(EVEN, [site("a", 50), site("b", 50)])
    group = as_group(parts or (), False, iter(["i0", "i1"]).__next__)
    assert group.head == 1 and as_group(parts or (), True, iter(["i0", "i1"]).__next__).head == 0
    members = [make_instance(one.instance_id, one.node, group=group) for one in group.members]
    other = make_instance("x", "c")
    assert [one.takes_calls for one in (*members, other)] == [False, True, True]
    assert [one.instance_id for one in members[1].helpers] == ["i0"]
    assert list(broken_groups([*members, other], lambda _: True)) == []
    broken = broken_groups([members[1], other], lambda member: member.instance_id != "i0")
    assert list(broken) == [members[1]]
