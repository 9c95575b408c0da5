import pytest

from invoker.instances.lifecycle import accepted
from invoker.loading.sources import choose_peers
from registry.errors import InvalidRecord
from registry.messages.images import ImageHolder
from registry.records.instance import InstanceState, StartKind
from tests.fixtures.invoker import start_request


def fresh():
    return accepted(start_request("i1", None), "n0", wall_s=100.0, now_s=10.0)


def test_phases_follow_each_other_without_a_gap() -> None:
    life = fresh().with_source(StartKind.COLD, "node:n1").with_state(InstanceState.LOADING, 101.0)
    life = (
        life.with_phase("fetch", 10.5).with_progress(0.5).with_phase("copy", 12.0).with_phase("bind", 12.25)
    )
    life = life.with_phase("ready", 12.5).ready(103.0, 12.75)
    record = life.record
    assert record.state is InstanceState.READY
    assert record.progress == 1.0
    assert list(record.phases_ms.values()) == [500.0, 1500.0, 250.0, 250.0, 250.0]
    assert sum(record.phases_ms.values()) == 2750.0
    assert (record.start_kind, record.source) == (StartKind.COLD, "node:n1")


def test_a_hot_start_skips_phases() -> None:
    life = fresh().with_state(InstanceState.LOADING, 100.0).with_phase("bind", 10.5).with_phase("ready", 11.0)
    assert set(life.ready(101.0, 11.0).record.phases_ms) == {"reserve", "bind", "ready"}


def test_phases_do_not_go_back_and_progress_does_not_shrink() -> None:
    life = fresh().with_phase("copy", 11.0)
    with pytest.raises(ValueError, match="cannot follow"):
        life.with_phase("fetch", 12.0)
    assert life.with_progress(0.7).with_progress(0.3).record.progress == 0.7


def test_the_transition_table_holds() -> None:
    with pytest.raises(InvalidRecord, match="cannot go from starting to ready"):
        fresh().with_state(InstanceState.READY, 101.0)
    failed = fresh().with_state(InstanceState.FAILED, 101.0, error="no room")
    assert failed.final and failed.record.error == "no room"
    with pytest.raises(InvalidRecord):
        failed.with_state(InstanceState.STOPPED, 102.0)


def holder(node: str, host: str, tier: str = "host") -> ImageHolder:
    return ImageHolder(node=node, host=host, cast=f"tcp://{node}:1", tier=tier)


PEERS = (holder("n0", "h0", "gpu"), holder("n1", "h0"), holder("n2", "h2"), holder("n3", "h0", "gpu"))


def test_the_nearest_peer_comes_first() -> None:
    assert [peer.node for peer in choose_peers(PEERS, node="n0", host="h0", shares_tier=True)] == ["n3", "n2"]
    assert choose_peers((), node="n0", host="h0", shares_tier=True) == []


def test_a_load_into_the_arena_reads_what_arrives_in_another_one_of_the_host() -> None:
    peers = choose_peers(PEERS, node="n0", host="h0", shares_tier=False)
    assert [peer.node for peer in peers] == ["n1", "n3", "n2"]


def test_a_peer_with_two_tiers_is_one_source() -> None:
    peers = (holder("n3", "h0"), holder("n2", "h2"), holder("n2", "h2", "gpu"), holder("n3", "h0", "gpu"))
    assert [peer.node for peer in choose_peers(peers, node="n0", host="h0", shares_tier=True)] == ["n3", "n2"]
