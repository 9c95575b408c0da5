"""What is predicted of starts, on which it depends whether they are live."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import pytest

from gateway.cluster.link_estimates import estimate_links
from gateway.cluster.link_rates import LinkRateCache
from gateway.live.forecast import ModelLoad, StartCosts, first_layer, model_loads, predict, start_costs
from gateway.live.model_layers import even_layers
from gateway.live.policy import LiveForecast
from gateway.planning.actions import StartAction
from rdmacast.cast.record import CastMember
from registry.messages.node import ImageHolder
from registry.records.cast import CastProgress, CastRecord, CastState
from registry.records.instance import StartKind
from registry.records.node import NodeRecord, Tier
from tests.fixtures import registry_records
from tests.fixtures.control import MIB, make_holding, make_instance, make_node, make_version

NODES = {name: make_node(name, link_rate_bytes_s=MIB) for name in ("s0", "s1", "a", "b", "c")}
VERSION = make_version(nbytes=8 * MIB)


def cast(*targets: str, sources: int) -> CastRecord:
    names = ["s0", "s1"][:sources] + list(targets)
    members = tuple(CastMember(node=name, host=f"host-{name}", address=name) for name in names)
    given = {"members": members, "sources": tuple(range(sources)), "planned": len(names)}
    return registry_records.cast(
        "c", image=VERSION.image, function="f", nbytes=VERSION.image_bytes, block_bytes=MIB, **given
    )


def start(node: str, record: CastRecord | None = None, holder: str = "") -> StartAction:
    holders = (ImageHolder(node=holder, host=f"host-{holder}", cast="", tier="host"),) if holder else ()
    return StartAction(
        instance_id=f"i-{node}", version=VERSION, node=node, holders=holders, max_concurrency=8, cast=record
    )


def foresee(
    starts: list[StartAction],
    nodes: Mapping[str, NodeRecord] = NODES,
    *,
    others: Sequence[ModelLoad] = (),
    has_ready: bool = False,
    queued: int = 0,
    queue_s: float = inf,
    costs: StartCosts | None = None,
    links: LinkRateCache | None = None,
) -> LiveForecast:
    return predict(
        [*model_loads(starts, nodes), *others],
        estimate_links(nodes.values(), links or LinkRateCache()),
        costs or StartCosts(),
        queued=queued,
        queue_s=queue_s,
        has_ready=has_ready,
    )


def test_sub_groups_bring_a_pipeline_in_their_parts_time() -> None:
    record = cast("a", "b", sources=2)
    found = foresee([start("a", record), start("b", record)], queued=3)
    assert (found.load_s, found.pipeline_s, found.queue_s) == (8.0, 4.0, inf)
    assert found.basis == "8.39 MB, links as capped"
    assert {one.group for one in model_loads([start("a", record), start("b", record)], NODES)} == {0, 1}


def test_one_order_brings_none_sooner_and_one_node_none_at_all() -> None:
    record = cast("a", "b", "c", sources=1)
    starts = [start(name, record) for name in ("a", "b", "c")]
    found = foresee(starts)
    assert found.pipeline_s == found.load_s == 9.0  # a step more than blocks: a binomial pipeline of four
    alone = foresee(starts[:1])
    assert alone.pipeline_s == inf and alone.is_single and not foresee(starts).is_single


def test_what_loads_already_is_sooner_by_what_it_has() -> None:
    record = cast("a", "b", sources=2)
    (half,) = model_loads([start("b", record)], NODES)
    found = foresee([start("a", cast("a", sources=1))], others=[replace(half, progress=0.5)])
    assert (found.load_s, found.pipeline_s) == (4.0, 0.0)


def test_loads_that_hold_all_layers_are_a_pipeline_now() -> None:
    loads = model_loads([start("a", holder="s0"), start("b", holder="s0")], NODES)
    layers, links = even_layers(8), estimate_links(NODES.values(), LinkRateCache())
    for held, covered in ((0b0000_0111, False), (0b0000_1111, True)):
        found = predict(
            [replace(load, layers=layers, held=one) for load, one in zip(loads, (held, 0xF0), strict=True)],
            links,
            StartCosts(),
            queued=0,
            queue_s=inf,
            has_ready=False,
        )
        assert (found.pipeline_s == 0.0) == covered and found.load_s == 8.0


def test_loads_from_one_holder_have_a_single_order() -> None:
    one = cast("a", "b", sources=1)
    two = cast("a", "b", sources=2)
    held = {
        name: replace(NODES[name], holdings=(make_holding("image-1", Tier.HOST),)) for name in ("s0", "s1")
    }
    for record, holders, lone in ((one, ("s0",), True), (one, ("s0", "s1"), False), (two, ("s0",), False)):
        nodes = {**NODES, **{name: held[name] for name in holders}}
        starts = [start("a", record), start("b", record)]
        assert [found.single_order for found in model_loads(starts, nodes)] == [lone, lone]
    # Without a holder a node reads the store; and two loads from one host's memory begin at different layers.
    assert not any(found.single_order for found in model_loads([start("a", one)], NODES))
    beside = {**NODES, "s0": held["s0"], "c": replace(NODES["c"], host="host-s0")}
    warm = [start("s0", holder="s0"), start("c", holder="s0")]
    assert [found.single_order for found in model_loads([*warm, start("a", one)], beside)] == [False] * 3
    assert all(found.single_order for found in model_loads([warm[0], start("a", one)], beside))


def test_a_slow_link_of_a_cast_holds_all_up() -> None:
    record = cast("a", "b", sources=2)
    nodes = {**NODES, "b": make_node("b", link_rate_bytes_s=MIB // 2)}
    assert foresee([start("a", record), start("b", record)], nodes).load_s == 16.0


def test_the_first_cast_over_slow_ports_is_not_taken_to_be_fast() -> None:
    nodes = {name: make_node(name, port_rate_bytes_s=MIB) for name in NODES}
    record = cast("a", "b", sources=2)
    found = foresee([start("a", record), start("b", record)], nodes)
    assert (found.load_s, found.pipeline_s) == (8.0, 4.0) and "as fast as their ports" in found.basis


def test_links_are_as_casts_showed_them() -> None:
    nodes = {name: make_node(name) for name in NODES}
    record = cast("a", "b", sources=2)
    links = LinkRateCache()
    for name in ("a", "b"):
        links.on_part_ended(part(name, nbytes=64 * MIB, seconds=8.0))
    links.on_cast_ended(record)
    starts = [start("a", record), start("b", record)]
    found = foresee(starts, nodes, links=links)
    # 63 of 64 blocks came in 8 s.
    assert found.load_s == pytest.approx(8 / (63 / 8)) and "as measured over tcp in 1 cast" in found.basis


def part(node: str, *, nbytes: int, seconds: float) -> CastProgress:
    times = {"seconds": seconds, "span_s": seconds, "blocks": 64, "held": 64, "updated_at": 1.0}
    received = {"received": {"tcp": nbytes}, "pulled": {"s0": nbytes}, "state": CastState.COMPLETE}
    return registry_records.cast_progress(node, "c", **times, **received)


def test_earlier_starts_tell_what_a_start_costs() -> None:
    phases = {"reserve": 10.0, "copy": 100.0, "bind": 150.0, "ready": 40.0}
    warm = make_instance("i0", "a", start_kind=StartKind.WARM, phases_ms=phases)
    cold = make_instance("i1", "b", phases_ms={**phases, "fetch": 5000.0, "copy": 5000.0})
    costs = start_costs([warm, cold], {("f", 1): 8 * MIB})
    assert costs.fixed_s == pytest.approx(0.2) and costs.copy_bytes_per_s == pytest.approx(80 * MIB)
    assert costs.basis == "0.0839 GB/s from host memory as measured in 1 start"
    assert start_costs([cold], {("f", 1): 8 * MIB}).copy_bytes_per_s == StartCosts().copy_bytes_per_s
    assert start_costs([], {}) == StartCosts()
    record = cast("a", "b", sources=2)
    found = foresee([start("a", record), start("b", record)], costs=costs)
    assert (found.load_s, found.pipeline_s) == pytest.approx((8.2, 4.2))


def test_a_pair_with_a_ready_instance_helps_from_half_of_the_load() -> None:
    loading = [start("a")]
    assert foresee(loading).zigzag_s == inf
    assert foresee(loading, has_ready=True).zigzag_s == foresee(loading).load_s
    found = foresee(loading, has_ready=True, queued=4, queue_s=1.5)
    assert (found.zigzag_s, found.queue_s, found.queued) == (found.load_s / 2, 1.5, 4)


def test_what_is_here_comes_from_host_memory_in_parts() -> None:
    held = (make_holding("image-1", Tier.HOST),)
    nodes = {**NODES, **{name: replace(NODES[name], holdings=held) for name in ("a", "b")}}
    starts = [start("a", holder="a"), start("b", holder="b")]
    found = foresee(starts, nodes)
    assert found.load_s == 2 * found.pipeline_s < 0.01
    assert found.basis == "4 GB/s from host memory assumed"
    assert foresee(starts).load_s == 8.0
    layers = even_layers(8)
    assert [first_layer(one, layers) for one in model_loads(starts, nodes)] == [2, 6]
    assert [first_layer(one, layers) for one in model_loads(starts, NODES)] == [0, 0]


def test_what_begins_later_begins_elsewhere() -> None:
    held = (make_holding("image-1", Tier.HOST),)
    nodes = {**NODES, **{name: replace(NODES[name], holdings=held) for name in ("s0", "s1", "a")}}
    layers = even_layers(12)
    (first,) = model_loads([start("s0", holder="s0")], nodes)
    assert (
        first.warm_loads and first_layer(first, layers) == 2
    )  # three nodes could give: a sixth of the layers
    assert first.offset is not None
    cold = cast("b", "c", sources=2)
    made = [start("a", holder="a"), start("b", cold), start("c", cold)]
    places = [one.offset for one in model_loads(made, nodes, [first.offset])]
    assert places == [0.75, 0.0, 0.5]
