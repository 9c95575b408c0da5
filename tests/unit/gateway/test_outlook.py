"""The load of all gateways together, seen capacities, and predicted starts."""

import math
from itertools import pairwise

import msgspec
import pytest

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.demand_sum import DemandSum
from gateway.planning.outlook import CapacityTable, LoadOutlook, StartTimes
from gateway.planning.work import InstanceCapacity
from registry.messages.node import InstanceLoad
from registry.records.change import NodeUp, VersionLoad
from registry.records.instance import InstanceState, StartKind
from registry.records.node import Tier
from tests.fixtures.control import MIB, make_holding, make_instance, make_node, make_version

KEY = VersionKey("f", 1)


def reported(calls: int, tokens: int, *, held: int = 0, in_flight: int = 0) -> VersionLoad:
    return VersionLoad(
        function="f",
        version=1,
        in_flight=in_flight,
        held=held,
        held_tokens=held * 100,
        arrived_calls=calls,
        arrived_tokens=tokens,
        service_s=2.0,
    )


def test_counters_of_gateways_that_come_go_and_begin_anew_never_fall() -> None:
    total = DemandSum()
    steps = (
        {"a": [reported(50, 5000, in_flight=2)]},
        {"a": [reported(52, 5200)], "b": [reported(1000, 100_000, held=1)]},  # b was there before
        {"b": [reported(1001, 100_100)]},  # a has no calls
        {"a": [reported(53, 5300)], "b": [reported(1, 100, held=1)]},  # b begins anew
    )
    seen = [total.update(reports)[KEY].tokens.arrived_tokens for reports in steps]
    assert [after - before for before, after in pairwise(seen)] == [300, 100, 200]


def test_counters_stay_while_a_version_has_no_calls() -> None:
    total = DemandSum()
    total.update({"a": [reported(50, 5000, held=1)]})
    idle = total.update({})[KEY]
    assert (idle.calls, idle.tokens.arrived_calls, idle.tokens.arrived_tokens) == (0, 50, 5000)
    assert total.update({"a": [reported(51, 5100, held=1)]})[KEY].tokens.arrived_tokens == 5100


def test_the_usual_prompt_is_right_at_first_sight() -> None:
    """Sixty long calls in flight, of which no prompt waits."""
    total = DemandSum()
    assert total.update({"a": [reported(10_000, 10_000_000, in_flight=60)]})[KEY].tokens.prompt_tokens == 1000
    both = {"a": [reported(10_000, 10_000_000)], "b": [reported(5000, 5_000_000, in_flight=60, held=3)]}
    assert total.update(both)[KEY].tokens.prompt_tokens == pytest.approx(1000, rel=0.01)


def test_calls_are_summed_and_those_without_tokens_are_uncounted() -> None:
    old = VersionLoad(function="f", version=1, in_flight=3, held=2)
    demand = DemandSum().update({"a": [reported(5, 500, held=4)], "b": [old]})[KEY]
    assert (demand.in_flight, demand.held) == (3, 6)
    assert (demand.tokens.held_tokens, demand.tokens.uncounted) == (400, 5)
    assert demand.tokens.service_s == 2.0


def instance_load(name: str, rate: float, used: int = 0) -> InstanceLoad:
    return InstanceLoad(
        instance_id=name,
        function="f",
        version=1,
        queued_prompt_tokens=0,
        running=0,
        waiting=0,
        decode_tokens_s=0.0,
        prefill_tokens_s=rate,
        decode_steps=((1, 0.01), (8, 0.02)),
        kv_used_tokens=used,
        kv_tokens=1000,
    )


def test_what_instances_were_seen_to_do_outlasts_them() -> None:
    table = CapacityTable()
    table.put("n0", (instance_load("a", 100.0, used=10), instance_load("b", 0.0)))
    table.put("n1", (instance_load("c", 300.0, used=20),))
    nodes = {"a": "n0", "b": "n0", "c": "n1"}
    seen = table.capacities(lambda id_: make_instance(id_, nodes[id_]))[KEY]
    assert (seen.prefill_tokens_s, seen.kv_used_tokens, seen.kv_tokens) == (100.0, 30, 1000)
    assert seen.decode_steps == ((1, 0.01), (8, 0.02))
    table.put("n0", ())
    table.put("n1", ())
    after = table.capacities(lambda id_: None)[KEY]
    assert (after.prefill_tokens_s, after.kv_used_tokens) == (100.0, 0)


def test_instances_that_share_a_node_count_with_the_kv_cache_that_they_have() -> None:
    """The second one has half of what the first left."""
    table = CapacityTable()
    smaller = msgspec.structs.replace(instance_load("b", 100.0, used=400), kv_tokens=500)
    table.put("n0", (instance_load("a", 100.0, used=100), smaller))
    seen = table.capacities(lambda id_: make_instance(id_, "n0"))[KEY]
    assert (2 * seen.kv_tokens, seen.kv_used_tokens) == (1500, 500)


def test_what_a_node_reports_of_instances_of_others_does_not_count() -> None:
    table = CapacityTable()
    table.put("n0", (instance_load("a", 100.0), instance_load("b", 1.0), instance_load("gone", 1.0)))
    nodes = {"a": "n0", "b": "n1"}
    seen = table.capacities(lambda id_: make_instance(id_, nodes[id_]) if id_ in nodes else None)
    assert seen[KEY].prefill_tokens_s == 100.0
    assert CapacityTable().capacities(lambda id_: None) == {}


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0, 1e-300])
def test_numbers_of_a_node_that_cannot_be_are_as_if_they_were_not_seen(rate: float) -> None:
    table = CapacityTable()
    bad = msgspec.structs.replace(
        instance_load("a", rate, used=1 << 62), decode_steps=((1, rate), (-3, 0.01), (4, 0.02))
    )
    table.put("n0", (bad,))
    seen = table.capacities(lambda id_: make_instance(id_, "n0"))[KEY]
    assert seen == InstanceCapacity(decode_steps=((4, 0.02),), kv_tokens=1000, kv_used_tokens=1000)


@pytest.mark.parametrize("phase_ms", [math.nan, math.inf, 1e300])
def test_a_start_that_took_for_ever_is_not_averaged(phase_ms: float) -> None:
    times, version = StartTimes(), make_version(nbytes=400 * MIB)
    before = times.expected_s(version, StartKind.COLD, 1e8)
    times.on_ready(make_instance("i", "n0", start_kind=StartKind.COLD, phases_ms={"fetch": phase_ms}))
    assert times.expected_s(version, StartKind.COLD, 1e8) == before


def test_starts_take_what_they_took_before_or_what_bytes_and_rates_say() -> None:
    times, version = StartTimes(), make_version(nbytes=400 * MIB)
    assert times.expected_s(version, StartKind.HOT, 1e9) == 0.1
    assert times.expected_s(version, StartKind.COLD, 1e8) > times.expected_s(version, StartKind.WARM, 1e8)
    times.on_ready(make_instance("i", "n0", start_kind=StartKind.COLD, phases_ms={"fetch": 900.0}))
    times.on_ready(make_instance("j", "n0", start_kind=StartKind.COLD, phases_ms={"fetch": 700.0}))
    assert times.expected_s(version, StartKind.COLD, 1e8) == 0.8


def test_further_starts_are_hot_warm_or_cold_by_what_free_nodes_hold() -> None:
    cache, outlook, version = ClusterStateCache(), LoadOutlook(), make_version()
    for id_, tiers in {"n0": (Tier.GPU, Tier.HOST), "n1": (Tier.GPU,), "n2": (Tier.HOST,), "n3": ()}.items():
        record = make_node(id_, holdings=(make_holding("image-1", *tiers),) if tiers else ())
        cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)
        cache.channel_up(id_, record.epoch)
    outlook.begin(cache, 0.0)
    starts = outlook.starts(version, ["n0"])
    assert (starts.hot, starts.warm, outlook.nodes) == (1, 1, 4)
    coming = make_instance("i", "n3", state=InstanceState.LOADING, start_kind=StartKind.COLD)
    (first,) = outlook.remaining_s(version, [coming], ())
    outlook.begin(cache, 0.05)
    (later,) = outlook.remaining_s(version, [coming], ())
    assert later < first
