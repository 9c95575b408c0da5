"""Pairs through the whole control side: calls use the pair while its target loads, then both."""

import asyncio

import pytest

from gateway.core.open_call import OpenCall
from gateway.fakes.node import tokens_after
from registry.messages.node import Tokens
from registry.records.function import Scaling
from registry.records.live import LiveMode
from tests.fixtures.control import ALL_LAYERS, ask, live_pipelines, make_call, open_cluster, open_gateway
from tests.fixtures.loading import loading_cluster
from tests.fixtures.patience import PATIENCE_S

PROMPT = (1, 2, 3)
TOKENS = 30


async def read(run: OpenCall) -> list[int]:
    return [one for event in [event async for event in run] if isinstance(event, Tokens) for one in event.ids]


async def test_a_ready_instance_takes_its_calls_by_the_pair_until_the_target_is_ready() -> None:
    async with asyncio.timeout(PATIENCE_S), loading_cluster(2, live=LiveMode.ZIGZAG) as live:
        await live.finish("n0")
        assert live.pipelines() == ()
        live.hold(n1=0b1)
        (pair,) = await live.until_pipelines(1)
        assert pair.way is LiveMode.ZIGZAG and [stage.node for stage in pair.stages] == ["n1", "n0"]
        (opening,) = live.cluster.nodes["n0"].pipelines.opened
        assert opening.layerwise
        answer = await ask(live.control, make_call(live.version))
        assert answer.assigned.start_kind == "live" and answer.assigned.node == "n0"
        live.hold(n1=0b111)
        await live.control.changes.wait_for(lambda: live.pipelines()[0].rate == 2.0)
        assert [one.name for one in live.pipelines()] == [pair.name]
        record = live.record()
        assert record is not None and record.way is LiveMode.ZIGZAG and record.reason == "live is zigzag"
        await live.finish("n1")
        await live.until_pipelines(0)
        await live.cluster.nodes["n0"].pipelines.until_left(0)
        answer = await ask(live.control, make_call(live.version, request_id="r2"))
        assert answer.assigned.start_kind == "hot"


@pytest.mark.parametrize("loses", [False, True])
async def test_calls_go_on_where_a_pair_ends_or_is_lost(loses: bool) -> None:
    async with asyncio.timeout(PATIENCE_S), loading_cluster(2, live=LiveMode.ZIGZAG) as live:
        await live.finish("n0")
        live.hold(n1=0b11)
        await live.until_pipelines(1)
        source = live.cluster.nodes["n0"]
        source.token.close()
        async with live.control.dispatcher.run(make_call(live.version, tokens=TOKENS)) as run:
            reading = asyncio.create_task(read(run))
            await source.token.arrived()
            if loses:
                await live.cluster.nodes["n1"].leave()
            else:
                await live.finish("n1")
            await live.until_pipelines(0)
            source.token.open()
            assert await reading == list(tokens_after(PROMPT, TOKENS))


async def test_the_next_controller_keeps_a_pair_until_its_target_is_ready() -> None:
    async with asyncio.timeout(PATIENCE_S), open_cluster(2, gateways=0) as cluster:
        source, target = cluster.nodes.values()
        async with open_gateway(cluster, "g0") as first:
            cluster.gateways.append(first)
            target.loading.close()
            source.loading.close()
            await cluster.deploy(Scaling(live=LiveMode.ZIGZAG, min_instances=2))
            await first.changes.wait_for(lambda: len(first.state_cache.instances()) == 2)
            source.loading.open()
            target.layers.hold(0b1)
            await first.changes.wait_for(lambda: len(live_pipelines(first)) == 1)
        async with open_gateway(cluster, "g1") as second:
            await second.changes.wait_for(lambda: len(source.pipelines.opened) == 2)
            assert len({one.pipeline for one in source.pipelines.opened}) == 1
            target.layers.hold(ALL_LAYERS)
            target.loading.open()
            await second.changes.wait_for(lambda: live_pipelines(second) == ())
