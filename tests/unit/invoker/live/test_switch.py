"""Pipelines of nodes that load: blocks in any order, calls that move, members that end, what each used."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from registry.errors import RemoteError
from registry.messages.live import MOVED, HandOffCalls
from registry.messages.node import CallsUsed, EndCalls, Generate, SettleCalls, StopInstance
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import (
    CUTS,
    Answer,
    LiveCluster,
    answer,
    goes_on,
    let_serve,
    live_cluster,
    open_pipeline,
    requests_for,
)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "llama-tied"])
async def test_calls_that_move_go_on_with_the_same_tokens(tmp_path: Path, kind: str) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), live_cluster(tmp_path, kind, 3) as live:
        let_serve(live)
        requests = requests_for(live, 6, tokens=96)
        seen: asyncio.Queue[int] = asyncio.Queue()
        async with open_pipeline(live, CUTS):
            running = [asyncio.create_task(answer(live.head.node, one, seen)) for one in requests]
            for _ in range(30):
                await seen.get()
            # One node has everything, and takes two of the calls; the others follow at the end.
            await live.nodes[1].until_ready()
            await live.head.node.ask(HandOffCalls(pipeline="p", epoch=0, request_ids=("r2", "r5", "gone")))
            early = await asyncio.gather(running[2], running[5])
        answers = await asyncio.gather(*running)
        expected = live.expected(requests)
        assert MOVED in {got.finish_reason for got in early}
        for request, got in zip(requests, answers, strict=True):
            assert got.usage is not None and got.usage.completion_tokens == len(got.ids)
            assert await goes_on(live.nodes[1], request, got) == expected[request.request_id]


async def test_blocks_come_in_any_order(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), live_cluster(tmp_path, "llama", 3) as live:
        requests = requests_for(live, 4)
        opening = asyncio.create_task(_serve(live, requests))  # asked for before any block is there
        layers = [(one, layer) for place, one in enumerate(live.nodes) for layer in _layers(place)]
        random.Random(3).shuffle(layers)
        for one, layer in layers:
            assert not opening.done()
            one.source.release(layer, layer + 1)
            await one.wait_for_layers(layer, layer + 1)
        answers = await opening
        expected = live.expected(requests)
        assert [got.ids for got in answers] == [expected[one.request_id] for one in requests]
        for one in live.nodes:
            await one.until_ready()
            assert one.held == 0b1111


def _layers(place: int) -> range:
    return range(CUTS[place], CUTS[place + 1])


async def _serve(live: LiveCluster, requests: list[Generate]) -> list[Answer]:
    async with open_pipeline(live, CUTS):
        return await asyncio.gather(*(answer(live.head.node, one) for one in requests))


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_a_member_that_is_stopped_ends_the_pipeline_by_its_name(tmp_path: Path, gone: int) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), live_cluster(tmp_path, "gpt2", 3) as live:
        let_serve(live)
        request = requests_for(live, 1, tokens=100)[0]
        seen: asyncio.Queue[int] = asyncio.Queue()
        async with live.head.node.channel.call(await live.opening(CUTS)) as opened:
            await anext(opened)
            running = asyncio.create_task(answer(live.head.node, request, seen))
            await seen.get()
            await live.nodes[gone].node.ask(StopInstance(instance_id=live.nodes[gone].instance, grace_s=0))
            for end in (running, anext(opened)):
                with pytest.raises(RemoteError) as lost:
                    await end
                assert lost.value.code == "pipeline_lost"
            assert lost.value.message.startswith(f"n{gone}: "), lost.value.message
        with pytest.raises(RemoteError) as refused:
            await answer(live.head.node, request)
        assert refused.value.code in ("no_such_pipeline", "no_such_instance")


async def test_a_second_opener_joins_and_the_last_one_ends_it(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), live_cluster(tmp_path, "llama", 3) as live:
        let_serve(live)
        first, second = requests_for(live, 2)
        async with open_pipeline(live, CUTS) as opened:
            async with open_pipeline(live, CUTS) as joined:
                assert joined == opened
            assert (await answer(live.head.node, first)).finish_reason == "length"
        # Formed anew: another epoch of it.
        for one in live.nodes:
            one.source.release(0, 4)
        async with open_pipeline(live, (0, 2, 3, 4), epoch=1):
            again = msgspec.structs.replace(second, pipeline="p.1")
            got = await answer(live.head.node, again)
            assert got.ids == live.expected([again])["r1"]


async def test_each_member_knows_what_it_spent_on_a_call(tmp_path: Path) -> None:
    async with asyncio.timeout(2 * PATIENCE_S), live_cluster(tmp_path, "qwen2", 3) as live:
        let_serve(live)
        requests = requests_for(live, 5)
        answers = await _serve(live, requests)
        names = tuple(one.request_id for one in requests)
        for one in live.nodes:
            (used,) = await one.node.ask(EndCalls(request_ids=(*names, "unknown")))
            assert isinstance(used, CallsUsed)
            assert set(used.gpu_us) == set(names) and min(used.gpu_us.values()) > 0
            busy = (await one.node.record()).counters["busy_us"]
            assert busy == sum(used.gpu_us.values())
            if one is live.head:
                assert used.gpu_us == {
                    name: got.usage.gpu_us for name, got in zip(names, answers, strict=True) if got.usage
                }
            await one.node.ask(SettleCalls(request_ids=names))
            (used,) = await one.node.ask(EndCalls(request_ids=names))
            assert isinstance(used, CallsUsed) and not used.gpu_us
