"""The directory: a fold of changes, its leases, its suspicions and what survives an outage."""

from dataclasses import replace

from control_fixture import make_holding, make_instance, make_node, make_version

from gateway.directory import Directory, VersionKey
from registry.change import (
    Demand,
    DemandChanged,
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    NodeGone,
    NodeUp,
    ScaleAsked,
    ScaleTarget,
    Snapshot,
)
from registry.function import Function
from registry.instance import InstanceState
from registry.node import NodeState, Tier

KEY = VersionKey("f", 1)
EMPTY = Snapshot(cursor="0", functions=(), versions=(), nodes=(), instances=(), demands=())


def up(id_: str, *, ttl_s: float = 10.0, **changes: object) -> NodeUp:
    return NodeUp(record=make_node(id_, **changes), ttl_s=ttl_s)


def with_node(*instances: str) -> Directory:
    directory = Directory()
    directory.apply(up("a"), 0)
    directory.reach("a", 1)
    for id_ in instances:
        directory.apply(InstanceChanged(record=make_instance(id_, "a")), 0)
    return directory


def ready(directory: Directory) -> list[str]:
    return [i.instance_id for i in directory.ready(KEY)]


def test_a_node_is_routed_to_only_while_its_channel_is_up() -> None:
    directory = with_node("i")
    assert ready(directory) == ["i"]
    directory.suspect("a")
    assert ready(directory) == [] and not list(directory.usable_nodes())
    directory.reach("a", 1)
    assert ready(directory) == ["i"]


def test_a_lease_runs_out_unless_renewed() -> None:
    directory = with_node("i")
    assert directory.next_expiry() == 10
    directory.apply(up("a"), 8)
    assert not directory.expire(17.9)
    assert directory.expire(18)
    assert directory.instance("i") is None and directory.nodes() == []


def test_a_later_epoch_forgets_the_instances_of_the_former() -> None:
    directory = with_node("i")
    directory.apply(up("a", epoch=2), 1)
    assert directory.instance("i") is None
    assert not list(directory.usable_nodes())  # the channel reached the former process
    directory.reach("a", 2)
    directory.apply(up("a", epoch=1), 2)
    directory.apply(NodeGone(id="a", epoch=1), 2)
    assert [n.epoch for n in directory.usable_nodes()] == [2]
    directory.apply(NodeGone(id="a", epoch=2), 2)
    assert directory.nodes() == []


def test_draining_nodes_and_leaving_instances_take_nothing() -> None:
    directory = with_node("i", "j")
    directory.set_leaving("i", True)
    assert ready(directory) == ["j"]
    directory.set_leaving("i", False)
    directory.apply(up("a", state=NodeState.DRAINING), 1)
    assert ready(directory) == []


def test_final_states_remove_the_record_and_failed_starts_are_counted() -> None:
    directory = with_node()
    loading = make_instance("i", "a", state=InstanceState.LOADING)
    directory.apply(InstanceChanged(record=loading), 0)
    assert [i.instance_id for i in directory.coming(KEY)] == ["i"]
    failed = replace(loading, state=InstanceState.FAILED, error="why")
    directory.apply(InstanceChanged(record=failed), 0)
    directory.start_failed(KEY, "i", "a", "told twice")
    assert [(f.node, f.error) for f in directory.failures(KEY)] == [("a", "why")]
    assert directory.failures(KEY, directory.failure_serial) == []
    assert directory.instance_keys() == []

    directory.apply(InstanceChanged(record=make_instance("j", "a")), 0)
    assert directory.failures(KEY) == []
    crashed = make_instance("j", "a", state=InstanceState.FAILED)
    directory.apply(InstanceChanged(record=crashed), 0)
    assert directory.failures(KEY) == []  # it had been ready: no failure of a start


def test_functions_versions_and_wishes() -> None:
    directory = Directory()
    head = Function(name="f", current=2, versions=(1, 2))
    directory.apply(FunctionChanged(function=head, version=make_version(version=2)), 0)
    assert directory.current("f") == make_version(version=2)
    directory.apply(ScaleAsked(target=ScaleTarget(function="f", instances=2)), 5)
    assert [(w.target.instances, w.arrived_s) for w in directory.wishes] == [(2, 5)]
    directory.apply(FunctionDeleted(name="f"), 6)
    assert directory.current("f") is None and directory.versions() == []


def test_demand_counts_others_and_runs_out() -> None:
    directory = Directory()
    for gateway in ("g", "h"):
        demand = Demand(gateway=gateway, function="f", version=1, in_flight=1, held=2)
        directory.apply(DemandChanged(gateway=gateway, demands=(demand,), ttl_s=5), 0)
    assert [d.gateway for d in directory.demands(besides="g")] == ["h"]
    directory.apply(DemandChanged(gateway="h", demands=(), ttl_s=5), 1)
    assert list(directory.demands(besides="g")) == []
    assert directory.expire(5) and list(directory.demands()) == []


def test_a_new_snapshot_keeps_the_nodes_whose_channel_is_up_for_one_lease() -> None:
    directory = with_node("i")
    directory.apply(up("gone"), 0)
    directory.load(EMPTY, 100)
    assert ready(directory) == ["i"]
    assert directory.node("gone") is None
    assert directory.expire(110) and directory.nodes() == []


def test_an_instance_counts_though_the_clock_of_its_node_was_set_back_since_the_node_started() -> None:
    directory = Directory()
    old = make_instance("i", "a", since=9.0)
    snapshot = replace(EMPTY, nodes=(up("a", started_at=50.0),), instances=(old,))
    directory.load(snapshot, 0)
    assert [i.instance_id for i in directory.instances(KEY)] == ["i"]


def test_after_an_outage_no_lease_ends_before_heartbeats_can_come() -> None:
    directory = with_node("i")
    snapshot = replace(EMPTY, nodes=(replace(up("a"), ttl_s=0.01),), instances=(make_instance("i", "a"),))
    directory.load(snapshot, 100)
    assert not directory.expire(101) and ready(directory) == ["i"]
    directory.postpone(120)
    assert not directory.expire(119) and directory.expire(120)


def test_a_node_that_lapsed_here_alone_needs_a_snapshot_to_have_its_instances_back() -> None:
    directory = with_node("i")
    assert directory.expire(100) and not directory.incomplete
    directory.apply(up("a", epoch=2), 101)  # another process, whose instances the feed tells of
    assert not directory.incomplete
    assert directory.expire(200)
    directory.apply(up("a", epoch=2), 201)
    assert directory.incomplete
    directory.load(EMPTY, 202)
    assert not directory.incomplete


def test_holders_by_image_and_tier() -> None:
    directory = with_node()
    directory.apply(up("a", holdings=(make_holding("image-1", Tier.HOST),)), 1)
    image = make_version().image
    assert image is not None
    assert [n.id for n in directory.holders(image, Tier.HOST)] == ["a"]
    assert directory.holders(image, Tier.GPU) == []
    directory.refresh(make_node("a", holdings=()))
    assert directory.holders(image, Tier.HOST) == []
