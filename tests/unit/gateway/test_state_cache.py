"""The state cache: a fold of changes, its leases, its suspicions and what survives an outage."""

from dataclasses import replace

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from registry.records.change import (
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    LoadReport,
    NodeGone,
    NodeUp,
    ScaleRequested,
    ScaleTarget,
    Snapshot,
    VersionLoad,
)
from registry.records.function import Function
from registry.records.instance import InstanceState
from registry.records.node import NodeState, Tier
from tests.fixtures.control import make_holding, make_instance, make_node, make_version

KEY = VersionKey("f", 1)
EMPTY = Snapshot(cursor="0", functions=(), versions=(), nodes=(), instances=(), load_reports=())


def up(id_: str, *, ttl_s: float = 10.0, **changes: object) -> NodeUp:
    return NodeUp(record=make_node(id_, **changes), ttl_s=ttl_s)


def with_node(*instances: str) -> ClusterStateCache:
    state_cache = ClusterStateCache()
    state_cache.apply(up("a"), 0)
    state_cache.channel_up("a", 1)
    for id_ in instances:
        state_cache.apply(InstanceChanged(record=make_instance(id_, "a")), 0)
    return state_cache


def ready(state_cache: ClusterStateCache) -> list[str]:
    return [i.instance_id for i in state_cache.ready(KEY)]


def test_a_node_is_routed_to_only_while_its_channel_is_up() -> None:
    state_cache = with_node("i")
    assert ready(state_cache) == ["i"]
    state_cache.channel_down("a")
    assert ready(state_cache) == [] and not list(state_cache.usable_nodes())
    state_cache.channel_up("a", 1)
    assert ready(state_cache) == ["i"]


def test_a_lease_runs_out_unless_renewed() -> None:
    state_cache = with_node("i")
    assert state_cache.next_expiry() == 10
    state_cache.apply(up("a"), 8)
    assert not state_cache.expire(17.9)
    assert state_cache.expire(18)
    assert state_cache.instance("i") is None and state_cache.nodes() == []


def test_a_later_epoch_forgets_the_instances_of_the_former() -> None:
    state_cache = with_node("i")
    state_cache.apply(up("a", epoch=2), 1)
    assert state_cache.instance("i") is None
    assert not list(state_cache.usable_nodes())  # the channel reached the former process
    state_cache.channel_up("a", 2)
    state_cache.apply(up("a", epoch=1), 2)
    state_cache.apply(NodeGone(id="a", epoch=1), 2)
    assert [n.epoch for n in state_cache.usable_nodes()] == [2]
    state_cache.apply(NodeGone(id="a", epoch=2), 2)
    assert state_cache.nodes() == []


def test_draining_nodes_and_leaving_instances_take_nothing() -> None:
    state_cache = with_node("i", "j")
    state_cache.set_draining("i", True)
    assert ready(state_cache) == ["j"]
    state_cache.set_draining("i", False)
    state_cache.apply(up("a", state=NodeState.DRAINING), 1)
    assert ready(state_cache) == []


def test_final_states_remove_the_record_and_failed_starts_are_counted() -> None:
    state_cache = with_node()
    loading = make_instance("i", "a", state=InstanceState.LOADING)
    state_cache.apply(InstanceChanged(record=loading), 0)
    assert [i.instance_id for i in state_cache.starting(KEY)] == ["i"]
    failed = replace(loading, state=InstanceState.FAILED, error="why")
    state_cache.apply(InstanceChanged(record=failed), 0)
    state_cache.backoff.log(KEY, "i", "a", "logged twice")
    assert [(f.node, f.error) for f in state_cache.backoff.failures(KEY)] == [("a", "why")]
    assert state_cache.backoff.failures(KEY, state_cache.backoff.serial) == []
    assert state_cache.instance_keys() == []

    state_cache.apply(InstanceChanged(record=make_instance("j", "a")), 0)
    assert state_cache.backoff.failures(KEY) == []
    crashed = make_instance("j", "a", state=InstanceState.FAILED)
    state_cache.apply(InstanceChanged(record=crashed), 0)
    assert state_cache.backoff.failures(KEY) == []  # it had been ready: no failure of a start


def test_wishes_of_a_snapshot_are_valid_for_as_long_as_it_says_and_come_once() -> None:
    state_cache = ClusterStateCache()
    old, new = (
        ScaleRequested(target=ScaleTarget(function="f", instances=count, token=str(count)), ttl_s=ttl_s)
        for count, ttl_s in ((1, 15.0), (2, 12.0))
    )
    state_cache.apply(old, 5)
    for now in (10, 11):
        state_cache.load(replace(EMPTY, scale_requests=(replace(old, ttl_s=20.0 - now), new)), now)
    assert [(w.target.instances, w.deadline_s) for w in state_cache.scale_requests] == [(1, 20), (2, 22)]


def test_functions_versions_and_wishes() -> None:
    state_cache = ClusterStateCache()
    head = Function(name="f", current=2, versions=(1, 2))
    state_cache.apply(FunctionChanged(function=head, version=make_version(version=2)), 0)
    assert state_cache.current("f") == make_version(version=2)
    wish = ScaleRequested(target=ScaleTarget(function="f", instances=2, token="t"))
    state_cache.apply(wish, 5)
    assert [(w.target.instances, w.deadline_s) for w in state_cache.scale_requests] == [(2, 20)]
    state_cache.apply(FunctionDeleted(name="f"), 6)
    assert state_cache.current("f") is None and state_cache.versions() == []


def test_demand_counts_others_and_runs_out() -> None:
    state_cache = ClusterStateCache()
    for gateway, held in (("g", 1), ("h", 2)):
        demand = VersionLoad(function="f", version=1, in_flight=1, held=held)
        state_cache.apply(LoadReport(gateway=gateway, loads=(demand,), ttl_s=5), 0)
    assert [load.held for report in state_cache.load_reports(exclude="g") for load in report.loads] == [2]
    state_cache.apply(LoadReport(gateway="h", loads=(), ttl_s=5), 1)
    assert list(state_cache.load_reports(exclude="g")) == []
    assert state_cache.expire(5) and list(state_cache.load_reports()) == []


def test_a_new_snapshot_keeps_the_nodes_whose_channel_is_up_for_one_lease() -> None:
    state_cache = with_node("i")
    state_cache.apply(up("gone"), 0)
    state_cache.load(EMPTY, 100)
    assert ready(state_cache) == ["i"]
    assert state_cache.node("gone") is None
    assert state_cache.expire(110) and state_cache.nodes() == []


def test_an_instance_counts_though_the_clock_of_its_node_was_set_back_since_the_node_started() -> None:
    state_cache = ClusterStateCache()
    old = make_instance("i", "a", since=9.0)
    snapshot = replace(EMPTY, nodes=(up("a", started_at=50.0),), instances=(old,))
    state_cache.load(snapshot, 0)
    assert [i.instance_id for i in state_cache.instances(KEY)] == ["i"]


def test_after_an_outage_no_lease_ends_before_heartbeats_can_come() -> None:
    state_cache = with_node("i")
    snapshot = replace(EMPTY, nodes=(replace(up("a"), ttl_s=0.01),), instances=(make_instance("i", "a"),))
    state_cache.load(snapshot, 100)
    assert not state_cache.expire(101) and ready(state_cache) == ["i"]
    state_cache.postpone(120)
    assert not state_cache.expire(119) and state_cache.expire(120)


def test_a_node_that_lapsed_here_alone_needs_a_snapshot_to_have_its_instances_back() -> None:
    state_cache = with_node("i")
    assert state_cache.expire(100) and not state_cache.needs_snapshot
    state_cache.apply(up("a", epoch=2), 101)  # another process, whose instances the feed reports
    assert not state_cache.needs_snapshot
    assert state_cache.expire(200)
    state_cache.apply(up("a", epoch=2), 201)
    assert state_cache.needs_snapshot
    state_cache.load(EMPTY, 202)
    assert not state_cache.needs_snapshot


def test_holders_by_image_and_tier() -> None:
    state_cache = with_node()
    state_cache.apply(up("a", holdings=(make_holding("image-1", Tier.HOST),)), 1)
    image = make_version().image
    assert image is not None
    assert [n.id for n in state_cache.holders(image, Tier.HOST)] == ["a"]
    assert state_cache.holders(image, Tier.GPU) == []
    state_cache.refresh(make_node("a", holdings=()))
    assert state_cache.holders(image, Tier.HOST) == []
