"""What is predicted of starts, on which it depends whether they are live."""

from dataclasses import replace
from math import inf

import pytest
from control_fixture import MIB, make_holding, make_node, make_version

from gateway.actions import StartOn
from gateway.live_outlook import arriving, first_layer, outlook
from gateway.model_layers import even_layers
from registry.cast import CastMember, CastRecord
from registry.messages import Holder
from registry.node import Tier

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


def test_sub_groups_bring_a_pipeline_in_their_parts_time() -> None:
    record = cast("a", "b", sources=2)
    found = outlook([start("a", record), start("b", record)], NODES, loading=0, ready=0, held=3)
    assert (found.wait_s, found.pipeline_s, found.queue_s) == (8.0, 4.0, inf)
    assert {one.group for one in arriving([start("a", record), start("b", record)], NODES)} == {0, 1}


def test_one_order_brings_none_sooner_and_one_node_none_at_all() -> None:
    record = cast("a", "b", "c", sources=1)
    starts = [start(name, record) for name in ("a", "b", "c")]
    assert outlook(starts, NODES, loading=0, ready=0, held=0).pipeline_s == 8.0
    assert outlook(starts[:1], NODES, loading=0, ready=0, held=0).pipeline_s == inf
    assert outlook(starts[:1], NODES, loading=1, ready=0, held=0).pipeline_s == 8.0


@pytest.mark.parametrize(("ready", "held", "queue_s"), [(1, 0, 0.0), (1, 2, inf), (0, 0, inf)])
def test_a_ready_instance_with_room_makes_nobody_wait(ready: int, held: int, queue_s: float) -> None:
    assert outlook([start("a")], NODES, loading=0, ready=ready, held=held).queue_s == queue_s


def test_what_is_here_comes_from_host_memory_in_parts() -> None:
    held = (make_holding("image-1", Tier.HOST),)
    nodes = {**NODES, **{name: replace(NODES[name], holdings=held) for name in ("a", "b")}}
    starts = [start("a", holder="a"), start("b", holder="b")]
    found = outlook(starts, nodes, loading=0, ready=0, held=0)
    assert found.wait_s == 2 * found.pipeline_s < 0.01
    assert outlook(starts, NODES, loading=0, ready=0, held=0).wait_s == 8.0
    layers = even_layers(8)
    assert [first_layer(one, layers) for one in arriving(starts, nodes)] == [0, 4]
    assert [first_layer(one, layers) for one in arriving(starts, NODES)] == [0, 0]
