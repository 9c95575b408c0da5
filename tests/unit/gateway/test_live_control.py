"""Live pipelines when controllers change, and their publication."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.cluster.state_cache import VersionKey
from gateway.control.assembly import Control
from gateway.control.leadership import LEASE
from gateway.core.contract import FunctionCall
from gateway.core.open_call import OpenCall
from gateway.fakes.node import FakeNode, tokens_after
from registry.messages.node import Tokens
from registry.records.change import LiveChanged
from registry.records.function import Scaling
from registry.records.live import LiveMode, LivePipeline
from tests.fixtures.control import (
    FakeCluster,
    ask,
    live_pipelines,
    make_call,
    open_cluster,
    open_gateway,
)
from tests.fixtures.loading import HIGH, LOW
from tests.fixtures.patience import PATIENCE_S

KEY = VersionKey("f", 1)
PROMPT = (1, 2, 3)
TOKENS = 30


@asynccontextmanager
async def first_gateway(
    cluster: FakeCluster, layers: tuple[int, ...] = (LOW, HIGH)
) -> AsyncIterator[Control]:
    """By it all nodes load, and two of them serve as a pipeline meanwhile if they hold these `layers`."""
    async with open_gateway(cluster, "g0") as control:
        cluster.gateways.append(control)
        for node in cluster.nodes.values():
            node.loading.close()
        await cluster.deploy(Scaling(live=LiveMode.PIPELINE, min_instances=len(layers)))
        await control.changes.wait_for(lambda: len(control.state_cache.instances()) == len(layers))
        for node, held in zip(cluster.nodes.values(), layers, strict=True):
            node.layers.hold(held)
        await control.changes.wait_for(lambda: len(live_pipelines(control)) == bool(any(layers)))
        yield control


def call_of(control: Control, **changes: Any) -> FunctionCall:
    version = control.state_cache.current("f")
    assert version is not None
    return make_call(version, **changes)


@asynccontextmanager
async def held_call(control: Control, head: FakeNode) -> AsyncIterator[OpenCall]:
    """Run a call whose first token the head delays, and check that all tokens arrive."""
    head.token.close()
    ids: list[int] = []
    async with control.dispatcher.run(call_of(control, tokens=TOKENS)) as run:
        reading = asyncio.create_task(read(run, ids))
        await head.token.arrived()
        yield run
        head.token.open()
        await reading
    assert ids == tokens_after(PROMPT, TOKENS)


async def test_the_next_controller_takes_pipelines_over_and_ends_them() -> None:
    async with open_cluster(2, gateways=0) as cluster:
        head = cluster.nodes["n1"]
        async with first_gateway(cluster) as first:
            (formed,) = live_pipelines(first)
            gateway = open_gateway(cluster, "g1")
            second = await gateway.__aenter__()
        try:
            # Its owner has stopped; the nodes continue until another controller recovers it.
            async with held_call(second, head) as run:
                assert run.assigned is not None and run.assigned.start_kind == "live"
                await second.changes.wait_for(
                    lambda: (second.stats().controller_epoch or 0) > 1 and len(head.pipelines.opened) == 2
                )
                assert [one.pipeline for one in head.pipelines.opened] == [formed.pipeline_id] * 2
                cluster.finish_loading()
                await second.changes.wait_for(lambda: live_pipelines(second) == ())
            assert (await ask(second, call_of(second, request_id="r2"))).assigned.start_kind == "hot"
        finally:
            await gateway.__aexit__(None, None, None)


async def test_a_pipeline_that_lost_a_member_meanwhile_is_closed() -> None:
    async with open_cluster(2, gateways=0) as cluster:
        async with first_gateway(cluster):
            pass
        await cluster.nodes["n0"].leave()
        async with open_gateway(cluster, "g1") as second:
            await second.changes.wait_for(
                lambda: second.stats().controller_epoch is not None and live_pipelines(second) == ()
            )
            await until_published(cluster, ())


async def test_the_next_controller_joins_starts_and_forms_their_pipelines() -> None:
    async with open_cluster(2, gateways=0) as cluster:
        first, second = cluster.nodes.values()
        async with first_gateway(cluster, (0, 0)) as control:
            assert live_pipelines(control) == ()
        async with open_gateway(cluster, "g1") as control:
            first.layers.hold(LOW)
            second.layers.hold(HIGH)
            await control.changes.wait_for(lambda: len(live_pipelines(control)) == 1)
            assert [node.counts["joins"] for node in (first, second)] == [1, 1]
            answer = await ask(control, call_of(control))
            assert answer.assigned.start_kind == "live"
            cluster.finish_loading()
            await control.changes.wait_for(
                lambda: live_pipelines(control) == () and len(control.state_cache.ready(KEY)) == 2
            )
            assert cluster.counts("starts") == 2


async def test_calls_move_from_a_pipeline_that_is_reconfigured() -> None:
    async with asyncio.timeout(PATIENCE_S), open_cluster(4, gateways=0) as cluster:
        head = cluster.nodes["n1"]
        async with first_gateway(cluster, (LOW, HIGH, 0, 0)) as control:
            async with held_call(control, head):
                # With these two the stages are half as long.
                cluster.nodes["n2"].layers.hold(0b001100)
                cluster.nodes["n3"].layers.hold(0b011000)
                await control.changes.wait_for(lambda: [one.epoch for one in live_pipelines(control)] == [1])
            assert [one.request_ids for one in head.pipelines.left] == [()]
            counts = control.dispatcher.counts
            assert (counts.moved, counts.failovers) == (1, 0)
            for node in cluster.nodes.values():
                node.loading.open()


async def test_without_the_lease_pipelines_that_the_next_controller_ends_are_closed() -> None:
    async with asyncio.timeout(PATIENCE_S), open_cluster(2, gateways=0) as cluster:
        head = cluster.nodes["n1"].pipelines
        async with first_gateway(cluster):
            pass
        async with open_gateway(cluster, "g1") as first:
            await first.changes.wait_for(lambda: len(head.opened) == 2)  # taken over
            async with open_gateway(cluster, "g2") as second:
                await cluster.state.release_lease(LEASE, "g1")
                await cluster.state.acquire_lease(LEASE, "g2", 60.0)
                await second.changes.wait_for(lambda: len(head.opened) == 3)
                for node in cluster.nodes.values():
                    node.loading.open()
                await head.until_left(1)  # the first one has disappeared


async def until_published(cluster: FakeCluster, expected: tuple[LivePipeline, ...]) -> None:
    """Return once the shared state has these pipelines."""
    snapshot = await cluster.state.snapshot()
    published = [change.record.pipelines for change in snapshot.live]
    if published == [expected]:
        return
    async for _, change in cluster.state.watch(snapshot.cursor):
        if isinstance(change, LiveChanged) and change.record.pipelines == expected:
            return


async def read(run: OpenCall, ids: list[int]) -> None:
    async for event in run:
        if isinstance(event, Tokens):
            ids += event.ids
