"""Nodes that load alone, through the whole control side: calls wait there, and go on there in the end."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway.cluster.replicas import pipeline_replica
from gateway.core.contract import DispatchError
from gateway.fakes.node import OUTPUT_US, tokens_after
from registry.records.live import LivePipeline
from tests.fixtures.control import open_gateway
from tests.fixtures.loading import LOW, PROMPT, Asking, LiveCluster, all_load, lone_cluster, one_holder
from tests.fixtures.patience import PATIENCE_S

TOKENS = 20


async def lone_nodes(live: LiveCluster, *nodes: str) -> tuple[LivePipeline, ...]:
    """Each has half of the layers, and takes calls."""
    live.hold(**dict.fromkeys(nodes, LOW))
    found = await live.until_pipelines(len(nodes))
    assert {one.stages[0].node for one in found} == set(nodes)
    assert all(len(one.stages) == 1 for one in found)
    return found


async def ask(live: LiveCluster, names: Sequence[str], *, held: int = 0) -> list[Asking]:
    """Return calls that are assigned, except for `held` that wait for a slot."""
    asked = [Asking(live, name, TOKENS) for name in names]
    for one in asked:
        await one.entered()
    assert live.control.stats().held == held
    return asked


async def test_calls_that_waited_there_go_on_there_and_take_its_slots() -> None:
    async with asyncio.timeout(PATIENCE_S), lone_cluster() as live:
        node = live.cluster.nodes["n0"]
        (lone,) = await lone_nodes(live, "n0")
        asked = await ask(live, [f"r{number}" for number in range(lone.slots + 1)], held=1)
        node.token.close()
        await live.finish("n0")
        await live.until_pipelines(0)
        await node.pipelines.until_left(0)
        # It is ready, and full with what it took before.
        asked += await ask(live, ["late"], held=2)
        node.token.open()
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, TOKENS)] * len(asked)
        kinds = [one.assigned[0].start_kind for one in asked]
        assert kinds[: lone.slots] == ["live"] * lone.slots and "live" not in kinds[lone.slots :]
        for one in asked:  # one try each, with its usage reported
            assert list(one.used().values()) == [(TOKENS * OUTPUT_US, True)]
        stats = live.control.stats()
        assert (stats.moved, stats.failovers) == (0, 0) and not live.control.dispatcher.slots.in_flight


async def test_a_call_that_is_left_while_it_waits_gives_its_slot_to_another() -> None:
    async with asyncio.timeout(PATIENCE_S), lone_cluster() as live:
        (lone,) = await lone_nodes(live, "n0")
        asked = await ask(live, [f"r{number}" for number in range(lone.slots + 1)], held=1)
        asked[0].task.cancel()
        await asked[-1].placed()
        await live.finish("n0")
        ended = [await one.ends() for one in asked[1:]]
        assert ended == [tokens_after(PROMPT, TOKENS)] * lone.slots


async def test_where_an_instance_has_room_others_take_calls_late_and_else_at_once() -> None:
    async with asyncio.timeout(PATIENCE_S), lone_cluster(2) as live:
        await live.finish("n0")
        node = live.cluster.nodes["n0"]
        node.token.close()
        (first,) = await ask(live, ["r"])
        await node.token.arrived()
        live.hold(n1=LOW)
        (ready,) = live.cluster.ready()
        asked = await ask(live, [f"r{number}" for number in range(1, ready.max_concurrency)])
        assert live.pipelines() == ()
        last = Asking(live, "last", TOKENS)
        (lone,) = await live.until_pipelines(1)
        assert lone.stages[0].node == "n1"
        await last.placed()
        live.cluster.nodes["n1"].loading.open()
        assert await last.ends() == tokens_after(PROMPT, TOKENS)
        assert last.assigned[0].start_kind == "live" and last.assigned[0].node == "n1"
        node.token.open()
        assert [await one.ends() for one in (first, *asked)] == [tokens_after(PROMPT, TOKENS)] * len(
            (first, *asked)
        )


async def test_a_node_that_dies_loses_no_call() -> None:
    async with asyncio.timeout(PATIENCE_S), lone_cluster(2) as live:
        lone = await lone_nodes(live, "n0", "n1")
        asked = await ask(live, [f"r{number}" for number in range(4)])
        slots = live.control.dispatcher.slots
        assert all(slots.room(pipeline_replica(one)) < one.slots for one in lone)
        await live.cluster.nodes["n0"].leave()
        await live.until_pipelines(1)
        live.cluster.nodes["n1"].loading.open()
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, TOKENS)] * 4
        assert live.control.stats().failovers > 0


async def test_calls_of_a_function_that_is_deleted_end() -> None:
    async with asyncio.timeout(PATIENCE_S), lone_cluster() as live:
        await lone_nodes(live, "n0")
        (asked,) = await ask(live, ["r"])
        await live.cluster.state.delete_function("f")
        with pytest.raises(DispatchError) as refused:
            await asked.ends()
        assert refused.value.code == "model_not_found"
        live.cluster.nodes["n0"].loading.open()  # only then its start ends
        await live.until_pipelines(0)


async def test_two_gateways_send_calls_there() -> None:
    async with asyncio.timeout(PATIENCE_S), lone_cluster(gateways=2) as live:
        await lone_nodes(live, "n0")
        await live.until_pipelines(1, 1)
        asked = [Asking(live, f"r{number}", TOKENS, gateway=number) for number in range(2)]
        await asyncio.gather(*(one.placed() for one in asked))
        await live.finish("n0")
        await live.until_pipelines(0, 1)
        assert [await one.ends() for one in asked] == [tokens_after(PROMPT, TOKENS)] * 2
        assert [one.assigned[0].start_kind for one in asked] == ["live"] * 2


async def test_the_next_controller_keeps_it_until_the_node_is_ready() -> None:
    async with asyncio.timeout(PATIENCE_S), one_holder(1) as cluster:
        node = cluster.nodes["n0"]
        async with open_gateway(cluster, "g0") as first:
            cluster.gateways.append(first)
            live = await all_load(cluster, 1)
            (lone,) = await lone_nodes(live, "n0")
        async with open_gateway(cluster, "g1") as second:
            cluster.gateways[:] = [second]
            await second.changes.wait_for(lambda: len(node.pipelines.opened) == 2)
            assert await live.until_pipelines(1) == (lone,)
            (asked,) = await ask(live, ["r"])
            await asked.placed()
            await live.finish("n0")
            await live.until_pipelines(0)
            assert await asked.ends() == tokens_after(PROMPT, TOKENS)
            assert list(asked.used().values()) == [(TOKENS * OUTPUT_US, True)]
