"""Casts as the feed reports them."""

from dataclasses import replace

from gateway.cluster.cast_cache import CastCache
from gateway.cluster.state_cache import ClusterStateCache
from rdmacast.cast.record import CastMember
from registry.records.change import CastChanged, Snapshot
from tests.fixtures.registry_records import NOW, cast

LATE = CastMember(node="n9", host="h9", address="tcp://127.0.0.1:9")


def test_the_latest_epoch_of_each_cast_counts() -> None:
    first = cast()
    joined = replace(first, members=(*first.members, LATE), epoch=1)
    known = CastCache([joined])
    known.update(first)  # heard of late
    known.update(cast("c1", image="b" * 64, started_at=NOW + 1))
    assert known.of_image(first.image) == [joined]
    assert [one.cast_id for one in known] == ["c1", "c0"]


def test_only_so_many_are_kept_the_latest() -> None:
    known = CastCache(cast(f"c{index}", started_at=NOW + index) for index in range(300))
    assert [one.cast_id for one in known][:2] == ["c299", "c298"]
    assert len(list(known)) == 256


def test_a_directory_has_them_from_snapshot_and_feed() -> None:
    state_cache = ClusterStateCache()
    snapshot = Snapshot(
        cursor="1", functions=(), versions=(), nodes=(), instances=(), load_reports=(), casts=(cast(),)
    )
    state_cache.load(snapshot, 0.0)
    later = cast("c1", started_at=NOW + 1)
    state_cache.apply(CastChanged(record=later), 0.0)
    assert state_cache.view().casts == (later, cast())
    assert state_cache.casts.of_image("a" * 64) == [later, cast()]
