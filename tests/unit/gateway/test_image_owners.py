"""Image owners by rendezvous hashing, within the memory of hosts. Pure."""

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.planning.image_owners import OwnedImage, OwnerHost, assign_owners, score

HOSTS = [f"h{number}" for number in range(8)]
SIZES = st.lists(st.integers(1, 4), min_size=0, max_size=30)


def hosts_of(names: list[str], memory: int = 1000) -> list[OwnerHost]:
    return [OwnerHost(id=name, weight=memory, room_bytes=memory, max_bytes=memory) for name in names]


def owners_of(images: list[OwnedImage], names: list[str], memory: int = 1000) -> dict[str, str]:
    return assign_owners(images, hosts_of(names, memory), lambda image: names)


def pin(images: list[OwnedImage], owners: dict[str, str]) -> list[OwnedImage]:
    return [replace(image, pinned=frozenset({owners[image.digest]})) for image in images]


@given(SIZES, st.integers(1, 8))
def test_every_image_has_one_owner_and_moves_come_to_an_end(sizes: list[int], count: int) -> None:
    names = HOSTS[:count]
    images = [OwnedImage(digest=f"i{number}", nbytes=size) for number, size in enumerate(sizes)]
    owners = owners_of(images, names)
    assert owners.keys() == {image.digest for image in images} and set(owners.values()) <= set(names)
    assert owners_of(list(reversed(images)), list(reversed(names))) == owners  # all gateways agree
    excess = excess_bytes(images, owners, count)
    while (after := owners_of(pin(images, owners), names)) != owners:
        owners, before = after, excess
        excess = excess_bytes(images, owners, count)
        assert excess < before  # only what exceeds the bounds moves, and to hosts within them


def excess_bytes(images: list[OwnedImage], owners: dict[str, str], hosts: int) -> float:
    """Return the bytes by which equal hosts exceed their bounds."""
    bound = 1.25 * sum(image.nbytes for image in images) / hosts
    owned = Counter[str]()
    for image in images:
        owned[owners[image.digest]] += image.nbytes
    return sum(max(0.0, nbytes - bound) for nbytes in owned.values())


@given(st.integers(0, 60), st.integers(1, 8))
def test_equal_images_are_spread_evenly(images: int, count: int) -> None:
    owners = owners_of([OwnedImage(digest=f"i{n}", nbytes=1) for n in range(images)], HOSTS[:count])
    counts = [list(owners.values()).count(name) for name in HOSTS[:count]]
    assert max(counts) <= max(1, math.ceil(1.25 * images / count))


@given(SIZES, st.integers(2, 8), st.data())
def test_when_a_host_goes_only_its_images_move(sizes: list[int], count: int, data: st.DataObject) -> None:
    names = HOSTS[:count]
    images = [OwnedImage(digest=f"i{number}", nbytes=size) for number, size in enumerate(sizes)]
    owners = owners_of(images, names)
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    after = owners_of(pin(images, owners), left)
    for digest_, owner in owners.items():
        assert after[digest_] == owner or owner == gone
    assert after.keys() == owners.keys()


@given(st.integers(0, 40), st.integers(1, 7))
def test_when_a_host_comes_only_what_exceeds_the_bounds_moves(images: int, count: int) -> None:
    made = [OwnedImage(digest=f"i{n}", nbytes=1) for n in range(images)]
    owners = owners_of(made, HOSTS[:count])
    after = owners_of(pin(made, owners), HOSTS[: count + 1])
    moved = [one for one in owners if after[one] != owners[one]]
    bound = max(1, math.floor(1.25 * images / (count + 1)))
    counts = [list(owners.values()).count(name) for name in HOSTS[:count]]
    assert len(moved) <= sum(max(0, owned - bound) for owned in counts)
    assert owners_of(pin(made, after), HOSTS[: count + 1]) == after


@given(SIZES, st.data())
def test_nothing_is_copied_while_a_copy_exists_and_hosts_are_balanced(
    sizes: list[int], data: st.DataObject
) -> None:
    images = [OwnedImage(digest=f"i{number}", nbytes=size) for number, size in enumerate(sizes)]
    holders = st.frozensets(st.sampled_from(HOSTS), min_size=1)
    images = [replace(image, holders=data.draw(holders)) for image in images]
    owners = assign_owners(images, hosts_of(HOSTS), lambda image: ())
    assert all(owners[image.digest] in image.holders for image in images)


@given(SIZES, st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_no_host_owns_more_than_it_holds(sizes: list[int], memories: list[int]) -> None:
    names = HOSTS[: len(memories)]
    hosts = [
        OwnerHost(id=name, weight=memory, room_bytes=memory, max_bytes=memory)
        for name, memory in zip(names, memories, strict=True)
    ]
    images = [OwnedImage(digest=f"i{number}", nbytes=size) for number, size in enumerate(sizes)]
    owners = assign_owners(images, hosts, lambda image: names)
    nbytes = {image.digest: image.nbytes for image in images}
    for host in hosts:
        assert sum(nbytes[one] for one, owner in owners.items() if owner == host.id) <= host.max_bytes
    for image in images:
        if image.digest not in owners:  # it fits nowhere any more
            assert all(
                image.nbytes + sum(nbytes[one] for one, owner in owners.items() if owner == host.id)
                > host.max_bytes
                for host in hosts
            )


def test_scores_follow_the_weight_of_hosts() -> None:
    wins = sum(score(f"i{n}", "large", 3) > score(f"i{n}", "small", 1) for n in range(4000))
    assert 0.72 < wins / 4000 < 0.78
