"""Casts as the feed tells of them."""

from dataclasses import replace

from gateway.directory import Directory
from gateway.known_casts import KnownCasts
from registry.cast import CastMember
from registry.change import CastChanged, Snapshot
from tests.registry_records import NOW, cast

LATE = CastMember(node="n9", host="h9", address="tcp://127.0.0.1:9")


def test_the_latest_epoch_of_each_cast_counts() -> None:
    first = cast()
    joined = replace(first, members=(*first.members, LATE), epoch=1)
    known = KnownCasts([joined])
    known.put(first)  # heard of late
    known.put(cast("c1", image="b" * 64, started_at=NOW + 1))
    assert known.of(first.image) == [joined]
    assert [one.cast_id for one in known] == ["c1", "c0"]


def test_only_so_many_are_kept_the_latest() -> None:
    known = KnownCasts(cast(f"c{index}", started_at=NOW + index) for index in range(300))
    assert [one.cast_id for one in known][:2] == ["c299", "c298"]
    assert len(list(known)) == 256


def test_a_directory_has_them_from_snapshot_and_feed() -> None:
    directory = Directory()
    snapshot = Snapshot(
        cursor="1", functions=(), versions=(), nodes=(), instances=(), demands=(), casts=(cast(),)
    )
    directory.load(snapshot, 0.0)
    later = cast("c1", started_at=NOW + 1)
    directory.apply(CastChanged(record=later), 0.0)
    assert directory.view().casts == (later, cast())
    assert directory.casts.of("a" * 64) == [later, cast()]
