"""What is predicted of starts, on which it depends whether they are live."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.link_estimates import estimate_links
from gateway.cluster.link_rates import LinkRateCache
from gateway.live.forecast import (
    ModelLoad,
    OpeningTimes,
    QueuedWork,
    StartCosts,
    first_layer,
    model_loads,
    predict,
    start_costs,
)
from gateway.live.model_layers import even_layers
from gateway.live.policy import LiveForecast
from gateway.planning.actions import StartAction
from rdmacast.cast.record import CastMember
from registry.messages.images import ImageHolder
from registry.records.cast import CastProgress, CastRecord, CastState
from registry.records.instance import StartKind
from registry.records.live import LiveMode
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
    queue: QueuedWork | None = None,
    costs: StartCosts | None = None,
    links: LinkRateCache | None = None,
    opening_s: float = 0.0,
) -> LiveForecast:
    return predict(
        [*model_loads(starts, nodes), *others],
        estimate_links(nodes.values(), links or LinkRateCache()),
        costs or StartCosts(),
        opening_in(opening_s),
        queue or QueuedWork(),
    )


def opening_in(seconds: float) -> OpeningTimes:
    times = OpeningTimes()
    for mode in (LiveMode.PIPELINE, LiveMode.ZIGZAG):
        times.on_opening_ended(mode, seconds)
    return times


def test_sub_groups_bring_a_pipeline_in_their_parts_time() -> None:
    record = cast("a", "b", sources=2)
    found = foresee([start("a", record), start("b", record)], queue=QueuedWork(calls=3))
    assert (found.plain_s, found.pipeline_s, found.queued) == (8.0, 4.0, 3)
    assert found.basis == "8.39 MB, links as capped"
    assert {one.group for one in model_loads([start("a", record), start("b", record)], NODES)} == {0, 1}


def test_one_order_brings_none_sooner_and_one_node_none_at_all() -> None:
    record = cast("a", "b", "c", sources=1)
    starts = [start(name, record) for name in ("a", "b", "c")]
    found = foresee(starts)
    assert found.pipeline_s == found.plain_s == 9.0  # a step more than blocks: a binomial pipeline of four
    alone = foresee(starts[:1])
    assert alone.pipeline_s == inf and alone.can_grow and not foresee(starts).can_grow


def test_what_loads_already_is_sooner_by_what_it_has() -> None:
    record = cast("a", "b", sources=2)
    (half,) = model_loads([start("b", record)], NODES)
    found = foresee([start("a", cast("a", sources=1))], others=[replace(half, progress=0.5)])
    assert (found.plain_s, found.pipeline_s) == (4.0, 0.0)


def test_loads_that_hold_all_layers_are_a_pipeline_now() -> None:
    loads = model_loads([start("a", holder="s0"), start("b", holder="s0")], NODES)
    layers, links = even_layers(8), estimate_links(NODES.values(), LinkRateCache())
    for held, covered in ((0b0000_0111, False), (0b0000_1111, True)):
        parts = [
            replace(load, layers=layers, held=one) for load, one in zip(loads, (held, 0xF0), strict=True)
        ]
        found = predict(parts, links, StartCosts(), opening_in(0.0), QueuedWork())
        assert found.plain_s == 8.0 and found.pipeline_s == (0.0 if covered else 8.0)


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
    assert foresee([start("a", record), start("b", record)], nodes).plain_s == 16.0


def test_the_first_cast_over_slow_ports_is_not_taken_to_be_fast() -> None:
    nodes = {name: make_node(name, port_rate_bytes_s=MIB) for name in NODES}
    record = cast("a", "b", sources=2)
    found = foresee([start("a", record), start("b", record)], nodes)
    assert (found.plain_s, found.pipeline_s) == (8.0, 4.0)
    assert "as fast as their ports" in found.basis


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
    assert found.plain_s == pytest.approx(8 / (63 / 8)) and "as measured over tcp in 1 cast" in found.basis


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
    assert (found.plain_s, found.pipeline_s) == pytest.approx((8.2, 4.2))


def test_a_pair_with_a_ready_instance_helps_from_half_of_the_load() -> None:
    loading = [start("a")]
    assert foresee(loading).zigzag_s == inf
    idle = QueuedWork(ready=1, ready_only_s=0.0)
    assert foresee(loading, queue=idle).zigzag_s == foresee(loading, queue=idle).plain_s == 0.0
    # All slots of the ready instance are taken for 20 s, those of the other are there after 8 s.
    found = foresee(loading, queue=QueuedWork(calls=4, ready=1, ready_only_s=20.0))
    assert (found.plain_s, found.zigzag_s, found.queued) == (8.0, 4.0, 4)
    # Prompts for 20 s: the two end at the same time, each half a second later for each second lost before.
    found = foresee(loading, queue=prompts(20.0, ready=1))
    assert (found.plain_s, found.zigzag_s) == (14.0, 12.0)
    assert foresee(loading, queue=prompts(20.0, ready=1), opening_s=1.0).zigzag_s == 12.5
    assert foresee(loading, queue=prompts(20.0, ready=1), opening_s=9.0).zigzag_s == 14.0
    # Prompts that the ready one has run before the other could help.
    assert foresee(loading, queue=prompts(3.0, ready=1)).zigzag_s == 3.0


def prompts(seconds: float, *, ready: int) -> QueuedWork:
    """Return so much work for one instance."""
    ready_only_s = seconds / ready if ready else inf
    return QueuedWork(
        calls=9, tokens=int(seconds * 100), tokens_per_s=100.0, ready=ready, ready_only_s=ready_only_s
    )


def shared(load_s: float, pipeline_s: float, *, loads: int) -> float:
    """Return from when on a node that is always ready would do as much by the end of the load."""
    return load_s - (load_s - pipeline_s) / (1 + 0.05 * loads)


def test_a_pipeline_is_compared_by_when_the_queue_is_done() -> None:
    record = cast("a", "b", sources=2)
    starts = [start("a", record), start("b", record)]
    found = foresee(starts, queue=prompts(10.0, ready=0))
    assert (found.plain_s, found.pipeline_s) == pytest.approx((13.0, 5.0 + shared(8.0, 4.0, loads=2)))
    # What it has done before the load ends has taken longer by its hops.
    found = foresee(starts, queue=prompts(4.0, ready=0))
    assert (found.plain_s, found.pipeline_s) == pytest.approx((10.0, 4.0 + 4.0 / 2 * 1.1))
    # An opening that takes as long as the rest of the load gains nothing.
    found = foresee(starts, queue=prompts(10.0, ready=0), opening_s=4.0)
    assert found.plain_s == found.pipeline_s == 13.0


def test_a_node_alone_gains_its_prompts_but_does_not_end_before_its_load() -> None:
    held = {"s0": replace(NODES["s0"], holdings=(make_holding("image-1", Tier.HOST),))}
    alone = [start("a", cast("a", sources=1))]
    nodes = {**NODES, **held}
    found = foresee(alone, nodes, queue=prompts(2.0, ready=0))
    assert (found.plain_s, found.pipeline_s, found.can_grow) == (10.0, 8.0, False)
    assert foresee(alone, nodes, queue=prompts(6.0, ready=0)).pipeline_s == 10.0
    assert foresee(alone, nodes, queue=prompts(6.0, ready=0), opening_s=1.0).pipeline_s == 11.0


def test_openings_are_as_they_were_of_late() -> None:
    times = OpeningTimes()
    assert times.expected_s(LiveMode.ZIGZAG) == 0.1
    for seconds in (0.4, 0.2, 0.2):
        times.on_opening_ended(LiveMode.ZIGZAG, seconds)
    assert times.expected_s(LiveMode.ZIGZAG) == pytest.approx(0.25)
    assert times.expected_s(LiveMode.PIPELINE) == 0.1


@given(
    seconds=st.floats(0.0, 100.0),
    ready=st.integers(0, 4),
    loads=st.integers(1, 3),
    sources=st.integers(1, 2),
    opening_s=st.floats(0.0, 20.0),
)
def test_live_serving_is_never_later_than_without_it(
    seconds: float, ready: int, loads: int, sources: int, opening_s: float
) -> None:
    names = ("a", "b", "c")[:loads]
    record = cast(*names, sources=sources)
    starts, queue = [start(name, record) for name in names], prompts(seconds, ready=ready)
    soon, late = (foresee(starts, queue=queue, opening_s=one) for one in (0.0, opening_s))
    for found in (soon, late):
        assert min(found.pipeline_s, found.zigzag_s) <= found.plain_s * (1 + 1e-9) or found.can_grow
    assert soon.pipeline_s <= late.pipeline_s * (1 + 1e-9) and soon.zigzag_s <= late.zigzag_s * (1 + 1e-9)
    assert soon.plain_s == late.plain_s


def test_what_is_here_comes_from_host_memory_in_parts() -> None:
    held = (make_holding("image-1", Tier.HOST),)
    nodes = {**NODES, **{name: replace(NODES[name], holdings=held) for name in ("a", "b")}}
    starts = [start("a", holder="a"), start("b", holder="b")]
    found = foresee(starts, nodes)
    assert found.plain_s == 2 * found.pipeline_s < 0.01
    assert found.basis == "4 GB/s from host memory assumed"
    assert foresee(starts).plain_s == 8.0
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
