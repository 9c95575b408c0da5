"""What is predicted of starts, on which it depends whether they are live."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import pytest
from control_fixture import MIB, make_holding, make_instance, make_node, make_version

from gateway.actions import StartOn
from gateway.known_links import known_links
from gateway.live_outlook import StartCosts, arriving, first_layer, outlook, start_costs
from gateway.live_policy import Outlook
from gateway.measured_links import MeasuredLinks
from gateway.model_layers import even_layers
from registry.cast import CastMember, CastProgress, CastRecord, CastState
from registry.instance import InstanceRecord, InstanceState, StartKind
from registry.messages import Holder
from registry.node import NodeRecord, Tier

NODES = {name: make_node(name, link_rate_bytes_s=MIB) for name in ("s0", "s1", "a", "b", "c")}
VERSION = make_version(nbytes=8 * MIB)


def cast(*targets: str, sources: int) -> CastRecord:
    names = ["s0", "s1"][:sources] + list(targets)
    return CastRecord(
        cast_id="c",
        image=VERSION.image or "",
        function="f",
        version=1,
        nbytes=VERSION.image_bytes,
        block_bytes=MIB,
        planner="binomial",
        reason="",
        members=tuple(CastMember(node=name, host=f"host-{name}", address=name) for name in names),
        sources=tuple(range(sources)),
        planned=len(names),
        started_at=0.0,
    )


def start(node: str, record: CastRecord | None = None, holder: str = "") -> StartOn:
    holders = (Holder(node=holder, host=f"host-{holder}", cast="", tier="host"),) if holder else ()
    return StartOn(
        instance_id=f"i-{node}", version=VERSION, node=node, holders=holders, max_concurrency=8, cast=record
    )


def foresee(
    starts: list[StartOn],
    nodes: Mapping[str, NodeRecord] = NODES,
    *,
    coming: Sequence[InstanceRecord] = (),
    ready: int = 0,
    held: int = 0,
    costs: StartCosts | None = None,
) -> Outlook:
    links = known_links(nodes.values(), MeasuredLinks())
    return outlook(starts, nodes, links, costs or StartCosts(), coming=coming, ready=ready, held=held)


def test_sub_groups_bring_a_pipeline_in_their_parts_time() -> None:
    record = cast("a", "b", sources=2)
    found = foresee([start("a", record), start("b", record)], held=3)
    assert (found.wait_s, found.pipeline_s, found.queue_s) == (8.0, 4.0, inf)
    assert found.said == "8.39 MB, links as capped"
    assert {one.group for one in arriving([start("a", record), start("b", record)], NODES)} == {0, 1}


def test_one_order_brings_none_sooner_and_one_node_none_at_all() -> None:
    record = cast("a", "b", "c", sources=1)
    starts = [start(name, record) for name in ("a", "b", "c")]
    found = foresee(starts)
    assert found.pipeline_s == found.wait_s == 9.0  # a step more than blocks: a binomial pipeline of four
    alone = foresee(starts[:1])
    assert alone.pipeline_s == inf and alone.alone and not foresee(starts).alone


def test_what_loads_already_is_sooner_by_what_it_has() -> None:
    half = make_instance("i-b", "b", state=InstanceState.LOADING, progress=0.5)
    found = foresee([start("a", cast("a", sources=1))], coming=[half])
    assert found.wait_s == found.pipeline_s == 4.0


def test_who_loads_in_the_one_order_of_one_holder_loads_alone() -> None:
    one = cast("a", "b", sources=1)
    two = cast("a", "b", sources=2)
    held = {
        name: replace(NODES[name], holdings=(make_holding("image-1", Tier.HOST),)) for name in ("s0", "s1")
    }
    for record, holders, lone in ((one, ("s0",), True), (one, ("s0", "s1"), False), (two, ("s0",), False)):
        nodes = {**NODES, **{name: held[name] for name in holders}}
        starts = [start("a", record), start("b", record)]
        assert [found.lone for found in arriving(starts, nodes)] == [lone, lone]
    # Where nobody holds it a node reads the store; and two that load from one host's memory begin apart.
    assert not any(found.lone for found in arriving([start("a", one)], NODES))
    beside = {**NODES, "s0": held["s0"], "c": replace(NODES["c"], host="host-s0")}
    warm = [start("s0", holder="s0"), start("c", holder="s0")]
    assert [found.lone for found in arriving([*warm, start("a", one)], beside)] == [False] * 3
    assert all(found.lone for found in arriving([warm[0], start("a", one)], beside))


def test_a_slow_link_of_a_cast_holds_all_up() -> None:
    record = cast("a", "b", sources=2)
    nodes = {**NODES, "b": make_node("b", link_rate_bytes_s=MIB // 2)}
    assert foresee([start("a", record), start("b", record)], nodes).wait_s == 16.0


def test_links_are_as_casts_showed_them() -> None:
    nodes = {name: make_node(name) for name in NODES}
    record = cast("a", "b", sources=2)
    links = MeasuredLinks()
    for name in ("a", "b"):
        links.told(part(name, nbytes=64 * MIB, seconds=8.0))
    links.over(record)
    starts = [start("a", record), start("b", record)]
    found = outlook(
        starts, nodes, known_links(nodes.values(), links), StartCosts(), coming=(), ready=0, held=0
    )
    # 63 of 64 blocks came in 8 s.
    assert found.wait_s == pytest.approx(8 / (63 / 8)) and "as measured over tcp in 1 cast" in found.said


def part(node: str, *, nbytes: int, seconds: float) -> CastProgress:
    return CastProgress(
        cast_id="c",
        node=node,
        state=CastState.COMPLETE,
        blocks=64,
        held=64,
        seconds=seconds,
        span_s=seconds,
        received={"tcp": nbytes},
        pulled={"s0": nbytes},
        updated_at=1.0,
    )


def test_earlier_starts_tell_what_a_start_costs() -> None:
    phases = {"reserve": 10.0, "copy": 100.0, "bind": 150.0, "ready": 40.0}
    warm = make_instance("i0", "a", start_kind=StartKind.WARM, phases_ms=phases)
    cold = make_instance("i1", "b", phases_ms={**phases, "fetch": 5000.0, "copy": 5000.0})
    costs = start_costs([warm, cold], {("f", 1): 8 * MIB})
    assert costs.fixed_s == pytest.approx(0.2) and costs.copy_bytes_per_s == pytest.approx(80 * MIB)
    assert start_costs([cold], {("f", 1): 8 * MIB}).copy_bytes_per_s == StartCosts().copy_bytes_per_s
    assert start_costs([], {}) == StartCosts()
    record = cast("a", "b", sources=2)
    found = foresee([start("a", record), start("b", record)], costs=costs)
    assert (found.wait_s, found.pipeline_s) == pytest.approx((8.2, 4.2))


@pytest.mark.parametrize(("ready", "held", "queue_s"), [(1, 0, 0.0), (1, 2, inf), (0, 0, inf)])
def test_a_ready_instance_with_room_makes_nobody_wait(ready: int, held: int, queue_s: float) -> None:
    assert foresee([start("a")], ready=ready, held=held).queue_s == queue_s


def test_what_is_here_comes_from_host_memory_in_parts() -> None:
    held = (make_holding("image-1", Tier.HOST),)
    nodes = {**NODES, **{name: replace(NODES[name], holdings=held) for name in ("a", "b")}}
    starts = [start("a", holder="a"), start("b", holder="b")]
    found = foresee(starts, nodes)
    assert found.wait_s == 2 * found.pipeline_s < 0.01
    assert found.said == "4 GB/s from host memory assumed"
    assert foresee(starts).wait_s == 8.0
    layers = even_layers(8)
    assert [first_layer(one, layers) for one in arriving(starts, nodes)] == [2, 6]
    assert [first_layer(one, layers) for one in arriving(starts, NODES)] == [0, 0]


def test_what_begins_later_begins_elsewhere() -> None:
    held = (make_holding("image-1", Tier.HOST),)
    nodes = {**NODES, **{name: replace(NODES[name], holdings=held) for name in ("s0", "s1", "a")}}
    layers = even_layers(12)
    (first,) = arriving([start("s0", holder="s0")], nodes)
    assert first.warms and first_layer(first, layers) == 2  # three nodes could give: a sixth of the layers
    assert first.place is not None
    cold = cast("b", "c", sources=2)
    made = [start("a", holder="a"), start("b", cold), start("c", cold)]
    places = [one.place for one in arriving(made, nodes, [first.place])]
    assert places == [0.75, 0.0, 0.5]
