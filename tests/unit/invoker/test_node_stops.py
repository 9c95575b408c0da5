"""The end of work on a node: callers that leave, stops, drains, engines that fail."""

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest

from registry.channel.client import Channel
from registry.errors import ChannelClosed, RemoteError
from registry.messages.images import WarmImage
from registry.messages.node import (
    Acknowledged,
    LogChunk,
    RequestUsage,
    StopInstance,
    TailLogs,
    Tokens,
)
from registry.records.node import NodeState
from tests.fixtures.fake_engine import StepGate
from tests.fixtures.invoker import (
    KIB,
    SECRET,
    FakeCluster,
    FakeEngines,
    generate,
    make_image,
    one_node,
    serving,
    start_request,
    started,
)

SIZE = 3 * 1024 * KIB + 1234


async def test_a_caller_that_leaves_does_not_end_the_start(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image) as (_, node):
        async with node.channel.call(start_request("i1", image)) as call:
            await anext(aiter(call))
        assert started(await node.ask(start_request("i1", image))).instance_id == "i1"


async def test_a_caller_that_leaves_ends_its_sequence(tmp_path: Path) -> None:
    gate = StepGate()
    async with serving(tmp_path, SIZE, gate) as node:
        gate.release(2)
        async with node.channel.call(generate("i1", tokens=1000)) as call:
            assert isinstance(await anext(aiter(call)), Tokens)
        gate.open()
        await node.ask(StopInstance(instance_id="i1", grace_s=60.0))
        assert node.engines.made[0].sequences == 0
        assert node.engines.made[0].steps < 1000


async def test_a_stop_lets_work_finish_and_refuses_more(tmp_path: Path) -> None:
    gate = StepGate()
    async with serving(tmp_path, SIZE, gate) as node:
        gate.release()
        async with node.channel.call(generate("i1")) as call:
            replies = aiter(call)
            first = await anext(replies)
            stopping = asyncio.create_task(node.ask(StopInstance(instance_id="i1")))
            await node.draining("i1")
            with pytest.raises(RemoteError) as refused:
                await node.ask(generate("i1", "r2"))
            assert refused.value.code == "draining"
            gate.open()
            rest = [reply async for reply in replies]
            assert sum(len(r.ids) for r in [first, *rest[:-1]]) == 6
        assert await stopping == [Acknowledged()]
        with pytest.raises(RemoteError) as raised:
            await node.ask(generate("i1", "r3"))
        assert raised.value.code == "no_such_instance"
        assert await node.ask(StopInstance(instance_id="nobody")) == [Acknowledged()]


async def test_a_stop_whose_caller_is_gone_still_ends_the_instance(tmp_path: Path) -> None:
    gate = StepGate()
    async with serving(tmp_path, SIZE, gate) as node:
        gate.release()
        controller = await Channel.connect((await node.record()).channel, SECRET.encode())
        async with node.channel.call(generate("i1")) as call:
            replies = aiter(call)
            await anext(replies)
            async with controller.call(StopInstance(instance_id="i1", grace_s=60.0)):
                await node.draining("i1")
                await controller.aclose()  # the gateway dies while the instance drains
            gate.open()
            rest = [reply async for reply in replies]
            assert isinstance(rest[-1], RequestUsage)
        # The next controller's stop finds it on its way out, or gone.
        assert await node.ask(StopInstance(instance_id="i1", grace_s=60.0)) == [Acknowledged()]
        record = await node.record()
        assert record.gpu_largest_room_bytes == record.gpu_bytes


async def test_a_shorter_stop_overtakes_a_longer_one_and_a_start_without_a_caller_can_be_stopped(
    tmp_path: Path,
) -> None:
    image, gate = make_image("a", SIZE), StepGate()
    async with one_node(tmp_path, image, engines=FakeEngines(gate=gate)) as (_, node):
        async with node.channel.call(start_request("i1", image)) as call:
            await anext(aiter(call))
        assert await node.ask(StopInstance(instance_id="i1")) == [Acknowledged()]
        await node.ask(start_request("i2", image))
        gate.release()
        async with node.channel.call(generate("i2", tokens=10_000)) as call:
            await anext(aiter(call))
            long = asyncio.create_task(node.ask(StopInstance(instance_id="i2", grace_s=600.0)))
            short = asyncio.create_task(node.ask(StopInstance(instance_id="i2", grace_s=0.0)))
            for _ in range(50):  # a step ends now and then, but the work would take far longer
                gate.release()
                await node.record()
            assert await short == await long == [Acknowledged()]
        record = await node.record()
        assert record.gpu_largest_room_bytes == record.gpu_bytes


async def test_an_engine_that_fails_takes_its_instance_along(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image) as (_, node):
        await node.ask(start_request("i1", image))
        node.engines.made[0].fail_next(RuntimeError("the device is on fire"))
        with pytest.raises(RemoteError, match="on fire"):
            await node.ask(generate("i1"))
        with pytest.raises(RemoteError, match="on fire"):
            await node.ask(start_request("i1", image))
        record = await node.record()
        assert record.gpu_largest_room_bytes == record.gpu_bytes
        (lines,) = await node.ask(TailLogs(function="f"))
        assert isinstance(lines, LogChunk)
        assert "on fire" in lines.lines[-1] and "cold start from disk" in " ".join(lines.lines)


@pytest.mark.parametrize("way", ["stop", "leave"])
async def test_a_second_stop_cuts_no_draining_short(tmp_path: Path, way: str) -> None:
    gate = StepGate()
    async with serving(tmp_path, SIZE, gate) as node:
        gate.release()
        stop = StopInstance(instance_id="i1", grace_s=60.0)
        async with node.channel.call(generate("i1")) as call:
            replies = aiter(call)
            await anext(replies)
            stops = [asyncio.create_task(node.ask(stop))]
            await node.draining("i1")
            if way == "stop":
                stops.append(asyncio.create_task(node.ask(stop)))
            else:
                node.stop.set()
                while (await node.record()).state is not NodeState.DRAINING:
                    pass
            for _ in range(5):
                await node.record()
            gate.open()
            assert isinstance([reply async for reply in replies][-1], RequestUsage)
        for one in stops:
            assert await one == [Acknowledged()]


async def test_of_an_instance_that_ended_little_is_kept(tmp_path: Path) -> None:
    def kept() -> Counter[str]:
        gc.collect()
        found = gc.get_objects()
        counts = Counter(type(one).__qualname__ for one in found)
        # The loop drops cancelled timers, each with a context, when it has a hundred or their time has come.
        counts["Context"] -= sum(type(one) is asyncio.TimerHandle and one.cancelled() for one in found)
        return counts

    image = make_image("a", 1 << 20)
    async with one_node(tmp_path, image) as (_, node):

        async def rounds(count: int, name: str) -> Counter[str]:
            for number in range(count):
                await node.ask(start_request(f"{name}{number}", image))
                await node.ask(StopInstance(instance_id=f"{name}{number}"))
                with pytest.raises(RemoteError, match="needs an image"):
                    await node.ask(start_request(f"bad{name}{number}", None))
            with pytest.raises(RemoteError, match="needs an image"):
                await node.ask(start_request(f"bad{name}0", None))
            return kept()

        await rounds(3, "a")
        before, after = await rounds(1, "b"), await rounds(10, "c")
    assert after["Instance"] == before["Instance"] + 20
    for name in ("Task", "coroutine", "traceback", "frame", "ImageRef", "Context"):
        assert after[name] <= before[name] + 5, (name, before[name], after[name])


async def test_a_node_that_leaves_finishes_its_work_first(tmp_path: Path) -> None:
    image, gate = make_image("a", SIZE), StepGate()
    async with FakeCluster(tmp_path) as cluster:
        async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            gate.release()
            async with node.channel.call(generate("i1")) as call:
                replies = aiter(call)
                await anext(replies)
                node.stop.set()
                while (await node.record()).state is not NodeState.DRAINING:
                    pass
                with pytest.raises(RemoteError) as raised:
                    await node.ask(WarmImage(image=image.ref()))
                assert raised.value.code == "draining"
                gate.open()
                assert isinstance([reply async for reply in replies][-1], RequestUsage)
            await node.task
            with pytest.raises(ChannelClosed):
                await node.record()
        snapshot = await cluster.state.snapshot()
        assert snapshot.nodes == () and snapshot.instances == ()
        states = [interval.state for interval in await cluster.state.intervals()]
        assert states == ["starting", "loading", "ready", "draining"]
