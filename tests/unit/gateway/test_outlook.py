"""The load of all gateways together, seen capacities, and predicted starts."""

from itertools import pairwise

from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.demand_sum import DemandSum
from gateway.planning.outlook import CapacityTable, LoadOutlook, StartTimes
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
    seen = table.capacities()[KEY]
    assert (seen.prefill_tokens_s, seen.kv_used_tokens, seen.kv_tokens) == (100.0, 30, 1000)
    assert seen.decode_steps == ((1, 0.01), (8, 0.02))
    table.put("n0", ())
    table.put("n1", ())
    after = table.capacities()[KEY]
    assert (after.prefill_tokens_s, after.kv_used_tokens) == (100.0, 0)


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
