"""The index of nodes: after any changes it is what the state cache's records say."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cluster.node_space import free_bytes, host_room_bytes, idle_used_at
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from registry.records.change import (
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    NodeGone,
    NodeUp,
    Snapshot,
)
from registry.records.function import Function
from registry.records.instance import InstanceState
from registry.records.node import CachedImage, NodeState, Tier
from tests.fixtures.call_counts import calls_made
from tests.fixtures.control import MIB, digest, make_holding, make_instance, make_node, make_version

IMAGES = ("image-a", "image-b")
NODES = ("n0", "n1", "n2", "n3")

Step = Callable[[ClusterStateCache], None]


def deploy(name: str, version: int, image: str | None, state_cache: ClusterStateCache) -> None:
    made = make_version(name, version, image=image, nbytes=4 * MIB)
    head = Function(name=name, current=version, versions=(1, 2))
    state_cache.apply(FunctionChanged(function=head, version=made), 0.0)


def node_up(
    id_: str, holdings: tuple[CachedImage, ...], state: NodeState, epoch: int, state_cache: ClusterStateCache
) -> None:
    record = make_node(
        id_,
        holdings=holdings,
        state=state,
        epoch=epoch,
        host=f"h{int(id_[1:]) // 2}",
        gpu_free_bytes=8 * MIB * epoch,
        reads_store=id_ != "n0",
        device="cuda:0" if id_ == "n1" else "cpu",
    )
    state_cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)


def run_instance(
    number: int, node: str, name: str, version: int, state: InstanceState, state_cache: ClusterStateCache
) -> None:
    record = make_instance(f"i{number}", node, name=name, version=version, state=state)
    state_cache.apply(InstanceChanged(record=record), 0.0)


def channel(id_: str, epoch: int, state_cache: ClusterStateCache) -> None:
    state_cache.channel_up(id_, epoch)


def forget(change: NodeGone | FunctionDeleted, state_cache: ClusterStateCache) -> None:
    state_cache.apply(change, 0.0)


def reload(state_cache: ClusterStateCache) -> None:
    state_cache.load(state_cache.view(), 1.0)


def empty(state_cache: ClusterStateCache) -> None:
    """Load a snapshot without nodes: those with a channel stay for one lease."""
    state_cache.load(
        Snapshot(cursor="1", functions=(), versions=(), nodes=(), instances=(), load_reports=()), 2.0
    )


nodes, names, numbers = st.sampled_from(NODES), st.sampled_from("fg"), st.integers(1, 2)
tiers = st.lists(st.sampled_from([Tier.GPU, Tier.HOST, Tier.DISK]), unique=True).map(tuple)
holdings = st.lists(
    st.builds(lambda image, held: make_holding(image, *held, nbytes=4 * MIB), st.sampled_from(IMAGES), tiers),
    max_size=2,
).map(tuple)
steps = st.lists(
    st.one_of(
        st.builds(partial, st.just(deploy), names, numbers, st.sampled_from([*IMAGES, None])),
        st.builds(partial, st.just(node_up), nodes, holdings, st.sampled_from(NodeState), numbers),
        st.builds(
            partial,
            st.just(run_instance),
            st.integers(0, 5),
            nodes,
            names,
            numbers,
            st.sampled_from(InstanceState),
        ),
        st.builds(partial, st.just(channel), nodes, st.integers(0, 2)),
        st.builds(
            partial,
            st.just(forget),
            st.one_of(st.builds(NodeGone, id=nodes, epoch=numbers), st.builds(FunctionDeleted, name=names)),
        ),
        st.sampled_from([reload, empty]),
    ),
    max_size=40,
)


def check(state_cache: ClusterStateCache) -> None:
    index, usable = state_cache.index, list(state_cache.usable_nodes())
    assert {node.id: node for node in usable} == {
        entry.record.id: entry.record for entry in state_cache.nodes() if entry.usable
    }
    for image in map(digest, IMAGES):
        held = [node for node in usable if any(one.image == image for one in node.holdings)]
        assert index.with_image(image) == held
        reader = [node for node in usable if node.reads_store][:1]
        assert index.sources(image) == held + [node for node in reader if node not in held]
        assert state_cache.versions(image) == [v for v in state_cache.versions() if v.image == image]
    for host in {node.host for node in usable}:
        assert index.on_host(host) == [node for node in usable if node.host == host]
    kinds = [(node.device, node.allows_handlers, node.gpu_bytes) for node in index.of_each_kind()]
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) == {(node.device, node.allows_handlers, node.gpu_bytes) for node in usable}
    order = []
    for node in usable:
        here = [one for one in state_cache.instances() if one.node == node.id]
        assert list(index.instances_on(node.id)) == here
        versions = (state_cache.version(VersionKey(one.function, one.version)) for one in here)
        used = frozenset(one.image for one in versions if one is not None and one.image is not None)
        space = index.space(node.id)
        assert (space.used, space.instances) == (used, len(here))
        assert space.free_bytes == free_bytes(node, used)
        assert space.host_room_bytes == host_room_bytes(node)
        assert space.idle_used_at == idle_used_at(node, used)
        order.append((len(here), -free_bytes(node, used), idle_used_at(node, used), node.id))
    assert list(index.emptiest()) == sorted(order)


@settings(max_examples=300)
@given(steps)
def test_after_any_changes_the_index_is_what_the_records_say(changes: list[Step]) -> None:
    state_cache = ClusterStateCache()
    for change in changes:
        change(state_cache)
        check(state_cache)


def test_a_heartbeat_among_many_nodes_costs_one_node_and_one_sort() -> None:
    state_cache = ClusterStateCache()
    for number in range(1000):
        node_up(f"n{number}", (), NodeState.READY, 1, state_cache)
        channel(f"n{number}", 1, state_cache)
    assert len(state_cache.index.emptiest()) == 1000

    def heartbeat() -> None:
        node_up("n7", (make_holding("image-a", Tier.HOST),), NodeState.READY, 1, state_cache)
        assert len(state_cache.index.emptiest()) == 1000
        assert [node.id for node in state_cache.index.with_image(digest("image-a"))] == ["n7"]

    assert calls_made(heartbeat) < 400  # of 1000 nodes


@pytest.mark.parametrize("known", [True, False])
def test_an_image_whose_version_is_unknown_counts_as_idle_until_it_is_read(known: bool) -> None:
    state_cache = ClusterStateCache()
    node_up("n1", (make_holding("image-a", Tier.GPU, nbytes=4 * MIB),), NodeState.READY, 1, state_cache)
    channel("n1", 1, state_cache)
    run_instance(0, "n1", "f", 1, InstanceState.READY, state_cache)
    assert state_cache.index.space("n1").free_bytes == 12 * MIB
    if known:
        state_cache.put_version(make_version("f", 1, image="image-a"))
    assert state_cache.index.space("n1").free_bytes == (8 if known else 12) * MIB
