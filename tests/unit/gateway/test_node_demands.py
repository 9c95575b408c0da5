"""How many nodes the platform lacks or does not need, from steps of the planner on states of a cluster."""

from dataclasses import replace

import pytest

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.core.node_demand import NodeDemand, NodePool
from gateway.planning.node_demands import node_demands
from gateway.planning.plan import VersionDemand
from gateway.planning.planner import ScalingPlanner
from gateway.planning.policy import ConcurrencyTarget, ScalerPolicy
from registry.records.change import FunctionChanged, InstanceChanged, NodeUp, ScaleRequested, ScaleTarget
from registry.records.function import Function, FunctionTask, Scaling
from registry.records.instance import InstanceState
from registry.records.node import CachedImage, NodeState, Tier
from tests.fixtures.control import MIB, make_holding, make_instance, make_node, make_version

POOL = NodePool(0, handlers=True)  # that of the fixtures' nodes
ONE_EACH = Scaling(target_concurrency=1, host_copies=0)


class Cluster:
    """A state cache and a planner: calls wait, and nothing that is planned happens."""

    def __init__(self, nodes: int = 0, policy: ScalerPolicy | None = None, **changes: object) -> None:
        self.cache = ClusterStateCache()
        self.planner = ScalingPlanner(policy or ConcurrencyTarget(), lambda key: f"{key}-{next(self._ids)}")
        self._ids = iter(range(10_000))
        self.held: dict[VersionKey, int] = {}
        self.now = 0.0
        for index in range(nodes):
            self.node(f"n{index}", **changes)

    def node(self, id_: str, *holdings: CachedImage, reached: bool = True, **changes: object) -> None:
        record = make_node(id_, **{"holdings": holdings, "device": "cpu", **changes})
        self.cache.apply(NodeUp(record=record, ttl_s=600.0), self.now)
        if reached:
            self.cache.channel_up(id_, record.epoch)

    def function(self, name: str, *, mib: int = 40, held: int = 0, scaling: Scaling = ONE_EACH) -> None:
        version = make_version(name, image=name, nbytes=mib * MIB)
        head = Function(name=name, current=1, versions=(1,), scaling=scaling)
        self.cache.apply(FunctionChanged(function=head, version=version), self.now)
        self.held[VersionKey(name, 1)] = held

    def instance(self, id_: str, node: str, name: str) -> None:
        self.cache.apply(InstanceChanged(record=make_instance(id_, node, name=name)), self.now)

    def demands(self) -> tuple[NodeDemand, ...]:
        demands = {key: VersionDemand(held=held) for key, held in self.held.items() if held}
        self.planner.plan(self.cache, demands, {}, self.now)
        starting_on = {start.node for start in self.planner.pending.values()}
        return node_demands(self.cache, self.planner.unplaced(self.cache), starting_on)

    def demand(self) -> NodeDemand:
        (only,) = self.demands()
        return only


def test_idle_nodes_are_spare_and_those_that_start_are_not() -> None:
    cluster = Cluster(3)
    assert cluster.demand() == NodeDemand(pool=POOL, nodes=3, spare=3)
    cluster.function("f", held=2)
    found = cluster.demand()
    assert (found.lacking, found.spare, found.wanted) == (0, 1, 2)


def test_calls_beyond_what_all_nodes_take_lack_nodes_although_the_function_may_use_all() -> None:
    cluster = Cluster(2)
    cluster.function("f", held=5)
    assert cluster.demand().lacking == 3
    assert cluster.demand().wanted == 5  # the starts of the step before are pending
    cluster.function("f", held=5, scaling=replace(ONE_EACH, max_instances=3))
    assert cluster.demand().wanted == 3
    cluster.function("f", held=0)
    assert cluster.demand().wanted == 2  # both are starting


def test_without_any_node_calls_and_a_minimum_lack_one() -> None:
    cluster = Cluster()
    assert cluster.demands() == ()
    cluster.function("f", scaling=replace(ONE_EACH, min_instances=2))
    assert cluster.demand() == NodeDemand(pool=NodePool(1, handlers=False), nodes=0, lacking=2)
    cluster.function("f", held=1)
    assert cluster.demand().lacking == 1


@pytest.mark.parametrize(
    ("sizes", "lacking"),
    [
        ((12, 12, 12), 1),  # 64 MiB an arena
        ((28, 28, 28), 2),
        ((40, 40, 40), 3),  # no two fit together
        ((40, 12, 12), 2),  # with the KV cache of each, of an eighth at least
    ],
)
def test_instances_of_several_functions_share_new_nodes_by_their_sizes(
    sizes: tuple[int, ...], lacking: int
) -> None:
    cluster = Cluster(1)
    cluster.function("first", mib=60, held=1)
    assert cluster.demand().wanted == 1
    for index, mib in enumerate(sizes):
        cluster.function(f"f{index}", mib=mib, held=1)
    assert cluster.demand().lacking == lacking


def test_what_only_waits_for_a_node_to_be_freed_or_tried_again_lacks_none() -> None:
    cluster = Cluster()
    cluster.node("n0", make_holding("idle", Tier.GPU, nbytes=60 * MIB), gpu_free_bytes=4 * MIB)
    cluster.function("idle", mib=60)
    cluster.instance("i", "n0", "idle")
    cluster.function("f", held=1)
    assert cluster.demand().lacking == 0 and "i" in cluster.planner.stopping  # idle surplus makes room
    other = Cluster(1)
    other.function("f", held=1)
    other.demand()
    (name,) = other.planner.pending
    other.planner.on_start_failed(VersionKey("f", 1), name, "n0", other.now, at_fault=True)
    assert other.demand().lacking == 0 and not other.planner.pending


def test_instances_on_named_nodes_lack_no_others() -> None:
    cluster = Cluster(2)
    cluster.function("f", scaling=replace(ONE_EACH, max_instances=4))
    target = ScaleTarget(function="f", instances=2, on=("n7", "n8"), token="t")
    cluster.cache.apply(ScaleRequested(target=target), cluster.now)
    assert cluster.demand().lacking == 0
    cluster.cache.apply(ScaleRequested(target=replace(target, instances=3, on=(), token="u")), cluster.now)
    assert cluster.demand().lacking == 1


def test_a_node_that_has_just_lost_its_channel_is_kept_and_a_draining_one_has_left() -> None:
    cluster = Cluster(1)
    cluster.node("away", reached=False)
    cluster.node("leaving", state=NodeState.DRAINING)
    assert cluster.demand() == NodeDemand(pool=POOL, nodes=2, spare=1)


def test_a_cordoned_node_is_spare_once_it_is_idle_and_no_place_for_what_is_lacking() -> None:
    cluster = Cluster(1)
    cluster.function("f")
    cluster.node("cordoned", cordoned=True)
    cluster.instance("i", "cordoned", "f")
    assert cluster.demand() == NodeDemand(pool=POOL, nodes=2, spare=1)
    cluster.function("g", held=2)
    assert cluster.demand().lacking == 1
    cluster.function("g", held=0)
    cluster.cache.apply(
        InstanceChanged(record=make_instance("i", "cordoned", name="f", state=InstanceState.STOPPED)), 0.0
    )
    assert cluster.demand() == NodeDemand(pool=POOL, nodes=2, spare=1)  # g is starting on the other


def test_hosts_that_the_kept_copies_need_are_not_spare() -> None:
    cluster = Cluster(3, host_bytes=64 * MIB)
    for name in ("a", "b", "c"):
        cluster.function(name, mib=30, scaling=replace(ONE_EACH, host_copies=1))
    assert cluster.demand().spare == 1  # 90 MiB take two hosts
    one_host = Cluster(3, host_bytes=64 * MIB, host="h")
    one_host.function("a", mib=30, scaling=replace(ONE_EACH, host_copies=1))
    assert one_host.demand().spare == 2  # the last node of the host keeps its memory


def test_pools_are_apart() -> None:
    cluster = Cluster()
    cluster.node("cpu", allows_handlers=True, gpu_bytes=16 * MIB, gpu_free_bytes=16 * MIB)
    cluster.node("gpu", device="cuda:0", allows_handlers=False)
    cluster.function("f", held=3)  # too large for the node of the handlers
    handlers, models = cluster.demands()
    assert handlers == NodeDemand(pool=NodePool(0, handlers=True), nodes=1, spare=1)
    assert models == NodeDemand(pool=NodePool(1, handlers=False), nodes=1, lacking=2)


def test_a_model_larger_than_an_arena_takes_several_nodes() -> None:
    cluster = Cluster(1)
    cluster.function("f", mib=150, scaling=replace(ONE_EACH, min_instances=1))
    assert cluster.demand().lacking == 3


def test_what_cannot_run_anywhere_lacks_no_node() -> None:
    cluster = Cluster(1, allows_handlers=False)
    version = make_version("h", image=None, task=FunctionTask.HANDLER)
    head = Function(name="h", current=1, versions=(1,), scaling=replace(ONE_EACH, min_instances=1))
    cluster.cache.apply(FunctionChanged(function=head, version=version), 0.0)
    assert cluster.demand() == NodeDemand(pool=NodePool(0, handlers=False), nodes=1, spare=1)


def test_instances_that_are_ready_keep_their_nodes() -> None:
    cluster = Cluster(2)
    cluster.function("f")
    cluster.instance("i", "n0", "f")
    assert cluster.demand().wanted == 1
    record = make_instance("i", "n0", name="f", state=InstanceState.STOPPED)
    cluster.cache.apply(InstanceChanged(record=record), cluster.now)
    assert cluster.demand().wanted == 0
