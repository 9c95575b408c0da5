"""When a cast is over: its last target reported so, or is gone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from gateway.cluster.cast_tracker import CastEnded
from gateway.cluster.condition import ChangeCondition
from gateway.cluster.state_cache import ClusterStateCache
from gateway.cluster.sync import ClusterStateSync
from gateway.http.metrics import Metrics
from gateway.planning.cast_planner import join
from rdmacast.cast.record import CastMember
from registry.clock import SystemClock
from registry.errors import NotFound
from registry.memory.state import MemoryState
from registry.records.cast import CastState
from registry.records.change import CastChanged, CastPartEnded, Change, NodeGone, NodeUp, Snapshot
from registry.records.function import Function
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import cast, cast_progress, node

LATE = CastMember(node="n9", host="h9", address="tcp://127.0.0.1:9")
EMPTY = Snapshot(cursor="", functions=(), versions=(), nodes=(), instances=(), load_reports=())


class Cluster:
    """A state cache with nodes n0, n1 and n2 and a cast since 1 s, and the ends of casts that it reported."""

    def __init__(self, *, planned: bool = True) -> None:
        self.state_cache = ClusterStateCache()
        self.ends: list[CastEnded] = []
        self.state_cache.cast_tracker.subscribe(self.ends.append)
        for index in range(3):
            self.up(f"n{index}")
        if planned:
            self.plan(1.0)

    def up(self, name: str, epoch: int = 1, now: float = 0.0) -> None:
        self.state_cache.apply(NodeUp(record=node(name, epoch), ttl_s=10.0), now)

    def plan(self, now: float, **changes: object) -> None:
        self.state_cache.apply(CastChanged(record=cast(**changes)), now)

    def end(self, name: str, now: float, state: CastState = CastState.COMPLETE, epoch: int = 0) -> None:
        progress = cast_progress(name, state=state, epoch=epoch)
        self.state_cache.apply(CastPartEnded(progress=progress), now)

    def reported(self) -> list[tuple[float, CastState]]:
        return [(end.seconds, end.state) for end in self.ends]


def test_a_cast_ends_once_with_its_last_target() -> None:
    cluster = Cluster()
    cluster.end("n1", 2.0)
    cluster.end("n1", 2.5)  # reported again
    assert not cluster.ends and "c0" in repr(cluster.state_cache.cast_tracker)
    cluster.end("n2", 4.0)
    cluster.end("n2", 5.0)
    assert cluster.reported() == [(3.0, CastState.COMPLETE)]


def test_it_waits_for_those_that_joined_but_ends_no_second_time() -> None:
    cluster = Cluster()
    joined = (*cast().members, LATE)
    cluster.plan(2.0, members=joined, epoch=1)
    cluster.plan(2.5)  # of a controller that is behind
    cluster.end("n1", 3.0)
    cluster.end("n2", 4.0)
    assert not cluster.ends
    cluster.end("n9", 5.0)
    later = (*joined, replace(LATE, node="n8", host="h8"))
    cluster.plan(6.0, members=later, epoch=2)
    cluster.end("n8", 7.0)
    assert cluster.reported() == [(4.0, CastState.COMPLETE)]


@pytest.mark.parametrize("how", ["gone", "lapsed", "anew"])
def test_a_target_that_is_lost_has_failed(how: str) -> None:
    cluster = Cluster()
    cluster.end("n1", 2.0)
    if how == "gone":
        cluster.state_cache.apply(NodeGone(id="n2", epoch=1), 3.0)
    elif how == "lapsed":
        cluster.up("n1", now=2.0)
        cluster.state_cache.expire(10.0)
    else:
        cluster.up("n2", epoch=2, now=3.0)
    assert [state for _, state in cluster.reported()] == [CastState.FAILED]


@pytest.mark.parametrize("port", [3, 33])
def test_a_target_that_comes_back_is_waited_for_again(port: int) -> None:
    cluster = Cluster()
    cluster.up("n2", epoch=2, now=2.0)
    back = replace(cast().members[2], address=f"tcp://127.0.0.1:{port}", epoch=1)
    cluster.plan(3.0, members=(*cast().members[:2], back), epoch=1)
    cluster.end("n1", 4.0)
    assert not cluster.ends
    cluster.end("n2", 5.0, epoch=1)
    assert cluster.reported() == [(4.0, CastState.COMPLETE)]


def test_the_last_word_of_its_earlier_part_may_come_once_more() -> None:
    cluster = Cluster()
    cluster.end("n2", 2.0, CastState.FAILED)
    back = replace(cast().members[2], epoch=1)
    cluster.plan(3.0, members=(*cast().members[:2], back), epoch=1)
    cluster.end("n1", 3.5)
    cluster.end("n2", 4.0, CastState.FAILED)
    assert not cluster.ends and cluster.state_cache.cast_tracker.pending_nodes("c0") == {"n2"}
    cluster.end("n2", 5.0, epoch=1)
    assert cluster.reported() == [(4.0, CastState.COMPLETE)]


def test_one_that_comes_back_beside_a_new_one_is_waited_for() -> None:
    cluster = Cluster()
    record = cast()
    cluster.end("n2", 2.0, CastState.FAILED)
    nodes = [node("n2", host="h2", cast="tcp://127.0.0.1:3"), node("n9", host="h9")]
    joined = join(record, nodes, 1.0)
    assert joined is not None and [one.epoch for one in joined.members] == [0, 0, 1, 1]
    cluster.state_cache.apply(CastChanged(record=joined), 3.0)
    cluster.end("n1", 3.5)
    cluster.end("n9", 4.0, epoch=1)
    assert not cluster.ends
    cluster.end("n2", 5.0, epoch=1)
    assert cluster.reported() == [(4.0, CastState.COMPLETE)]


def test_one_that_joins_brings_no_lost_one_back() -> None:
    cluster = Cluster()
    cluster.state_cache.apply(NodeGone(id="n2", epoch=1), 3.0)
    cluster.plan(4.0, members=(*cast().members, LATE), epoch=1)
    cluster.end("n1", 4.5)
    cluster.end("n9", 5.0)
    assert cluster.reported() == [(4.0, CastState.FAILED)]


def test_a_source_that_is_lost_ends_nothing() -> None:
    cluster = Cluster()
    cluster.state_cache.apply(NodeGone(id="n0", epoch=1), 2.0)
    cluster.end("n1", 3.0)
    cluster.end("n2", 4.0, CastState.CANCELLED)
    assert cluster.reported() == [(3.0, CastState.CANCELLED)]


def test_a_cast_of_a_snapshot_was_not_heard_of_from_its_begin() -> None:
    cluster = Cluster(planned=False)
    cluster.state_cache.load(replace(EMPTY, casts=(cast(),)), 0.0)
    cluster.end("n1", 3.0)
    cluster.end("n2", 4.0)
    assert not cluster.ends


@pytest.mark.parametrize("back", [False, True])
def test_what_was_lost_while_the_feed_was_cut_off_is_waited_for_no_longer(back: bool) -> None:
    cluster = Cluster()
    cluster.end("n1", 2.0)
    there = [node("n0"), node("n1"), *([node("n2", 2)] if back else [])]
    nodes = tuple(NodeUp(record=one, ttl_s=10.0) for one in there)
    cluster.state_cache.load(replace(EMPTY, nodes=nodes), 5.0)
    assert cluster.reported() == [(4.0, CastState.FAILED)]


class Gap(MemoryState):
    """Its feed is cut off, once, before a node's last word."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = False
        self.again = asyncio.Event()

    async def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        async for at, change in super().watch(cursor):
            if isinstance(change, CastPartEnded) and not self.cut:
                self.cut = True
                await self.again.wait()
                raise NotFound("the cursor is too old")
            yield at, change


@pytest.mark.parametrize("gone", [False, True])
async def test_last_words_that_were_said_while_the_feed_was_cut_off_are_heard(gone: bool) -> None:
    state, cluster, changes = Gap(), Cluster(planned=False), ChangeCondition()
    for name in ("n0", "n1", "n2"):
        await state.put_node(node(name), 60.0)
    sync = ClusterStateSync(state, cluster.state_cache, changes, SystemClock())
    task = asyncio.create_task(sync.run())
    async with asyncio.timeout(PATIENCE_S):
        await sync.ready.wait()
        await state.put_cast(cast())
        await changes.wait_for(lambda: cluster.state_cache.cast_tracker.running == ["c0"])
        for name in ("n1", "n2"):
            await state.put_cast_progress(cast_progress(name, state=CastState.COMPLETE))
        if gone:
            await state.remove_node("n2", 1)
        state.again.set()
        await changes.wait_for(lambda: bool(cluster.ends))
    task.cancel()
    await asyncio.wait([task])
    assert [end.state for end in cluster.ends] == [CastState.COMPLETE]


def test_only_so_many_are_kept() -> None:
    cluster = Cluster()
    for index in range(300):
        cluster.plan(1.0, cast_id=f"c{index}")
    for name in ("n1", "n2"):
        cluster.state_cache.apply(NodeGone(id=name, epoch=1), 2.0)
    assert len(cluster.ends) == 256


def test_metrics_tell_how_long_casts_took_and_what_came_by_which_transport() -> None:
    counters = {"cast_recv_bytes": 5, "cast_recv_bytes_tcp": 4, "cast_recv_bytes_shm": 1}
    tiny = Function(name="tiny", current=1, versions=(1,))
    nodes = (NodeUp(record=node("n1", counters=counters), ttl_s=6.0),)
    view = replace(EMPTY, functions=(tiny,), nodes=nodes)
    metrics = Metrics(lambda: view)
    cluster = Cluster()
    cluster.state_cache.cast_tracker.subscribe(metrics.note_cast)
    cluster.end("n1", 2.0)
    cluster.end("n2", 3.0)
    text = metrics.render().decode()
    assert 'hypercast_cast_duration_seconds_sum{function="tiny",state="complete"} 2.0' in text
    assert metrics.render().decode() == text  # a scrape counts nothing
    assert 'hypercast_cast_bytes_total{node="n1",transport="tcp"} 4.0' in text
    assert 'hypercast_cast_bytes_total{node="n1",transport="shm"} 1.0' in text
