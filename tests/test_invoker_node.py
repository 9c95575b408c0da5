"""A node from outside: starts from every tier, the work it does, its life cycle."""

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest

from invoker.engine.fake import StepGate, continuation
from registry.channel import Channel
from registry.clock import SystemClock
from registry.errors import ChannelClosed, RemoteError
from registry.instance import InstanceState
from registry.messages import (
    Compute,
    Done,
    DropImage,
    Generate,
    InstanceProgress,
    InstanceStarted,
    InvokeHandler,
    LogLines,
    Sampling,
    StopInstance,
    TailLogs,
    Tokens,
    Usage,
    WarmImage,
)
from registry.node import NodeState, Tier
from tests.invoker_fixture import KIB, SECRET, FakeCluster, FakeEngines, make_image, start_request

SIZE = 3 * 1024 * KIB + 1234
PROMPT = (5, 6, 7)
FUNCTIONS = Path(__file__).parent.parent / "functions"


def generate(instance: str, request: str = "r1", tokens: int = 6) -> Generate:
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    return Generate(request_id=request, instance_id=instance, prompt_ids=PROMPT, sampling=sampling)


def started(replies) -> InstanceStarted:
    assert all(isinstance(reply, InstanceProgress) for reply in replies[:-1])
    assert isinstance(replies[-1], InstanceStarted)
    return replies[-1]


def test_cold_from_the_store_then_hot_then_warm(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            cold = started(await node.ask(start_request("i1", image)))
            assert cold.start_kind == "cold"
            assert set(cold.phases_ms) == {"reserve", "fetch", "copy", "bind", "ready"}
            hot = started(await node.ask(start_request("i2", image)))
            assert hot.start_kind == "hot" and "fetch" not in hot.phases_ms
            record = await node.record()
            assert record.holdings[0].tiers == (Tier.GPU, Tier.HOST)
            await node.ask(StopInstance(instance_id="i1"))
            await node.ask(StopInstance(instance_id="i2"))
            record = await node.record()
            assert record.holdings[0].tiers == (Tier.HOST,)
            assert record.gpu_free_bytes == record.gpu_bytes
            warm = started(await node.ask(start_request("i3", image)))
            assert warm.start_kind == "warm"
            counters = (await node.record()).counters
            assert counters["disk_read_bytes"] == SIZE and counters["store_read_bytes"] == 0
            assert [counters[f"starts_{kind}"] for kind in ("cold", "hot", "warm")] == [1, 1, 1]
        assert not cluster.shm.exists()

    asyncio.run(scenario())


def test_a_cold_start_from_another_host_reads_no_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h1") as second,
        ):
            await cluster.put(image)
            await first.ask(start_request("i1", image))
            cold = started(await second.ask(start_request("i2", image, await first.holder())))
            assert cold.start_kind == "cold"
            counters = (await second.record()).counters
            assert counters["disk_read_bytes"] == 0 and counters["cast_recv_bytes"] == SIZE
            assert (await first.record()).counters["cast_sent_bytes"] >= SIZE
            (record,) = (r for r in (await cluster.state.snapshot()).instances if r.instance_id == "i2")
            assert record.source == "node:n0" and record.state is InstanceState.READY

    asyncio.run(scenario())


def test_nodes_of_one_host_share_the_copy(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h0") as second,
        ):
            await cluster.put(image)
            both = await asyncio.gather(
                first.ask(start_request("i1", image)), second.ask(start_request("i2", image))
            )
            assert {started(replies).start_kind for replies in both} <= {"cold", "warm"}
            read = [(await node.record()).counters["disk_read_bytes"] for node in (first, second)]
            assert sorted(read) == [0, SIZE]
            (only,) = [path.name for path in (cluster.shm / "h0").iterdir() if len(path.name) >= 64]
            assert only == image.digest
            records = [await node.record() for node in (first, second)]
            assert {record.host_free_bytes for record in records} == {records[0].host_bytes - SIZE}

    asyncio.run(scenario())


def test_the_accelerator_serves_an_image_that_left_host_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h1") as second,
        ):
            blob = await cluster.put(image)
            await first.ask(start_request("i1", image))
            blob.unlink()
            (done,) = await first.ask(DropImage(image=image.digest, tier="host"))
            assert done == Done(detail="dropped")
            assert (await first.record()).holdings[0].tiers == (Tier.GPU,)
            await second.ask(WarmImage(image=image.ref(await first.holder("gpu")), function="f"))
            assert (await second.record()).holdings[0].tiers == (Tier.HOST,)
            replies = await first.ask(WarmImage(image=image.ref()))
            assert isinstance(replies[-1], Done) and "from arena" in replies[-1].detail

    asyncio.run(scenario())


def test_when_the_holders_fail_the_store_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            async with cluster.node("n1", "h1") as other:
                gone = await other.holder()
            await node.ask(start_request("i1", image, gone))
            assert (await node.record()).counters["disk_read_bytes"] == SIZE

    asyncio.run(scenario())


def test_damage_in_the_store_fails_the_start_and_names_the_units(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            blob = await cluster.put(image)
            damaged = bytearray(image.data)
            damaged[5 * 256 * KIB] ^= 1
            damaged[-1] ^= 1
            blob.write_bytes(damaged)
            with pytest.raises(RemoteError, match=r"damaged in the store: units (5|12)") as raised:
                await node.ask(start_request("i1", image))
            assert raised.value.code == "start_failed"
            record = await node.record()
            assert record.holdings == () and record.gpu_free_bytes == record.gpu_bytes
            assert record.host_free_bytes == record.host_bytes
            with pytest.raises(RemoteError, match="damaged"):
                await node.ask(start_request("i1", image))
            blob.write_bytes(image.data)
            assert started(await node.ask(start_request("i2", image))).start_kind == "cold"

    asyncio.run(scenario())


def test_too_little_memory_is_said_with_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        small = FakeEngines(kv=(15 << 20, 15 << 20))
        image, large = make_image("a", SIZE), make_image("b", 17 << 20)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0", engines=small) as node:
            await cluster.put(image)
            with pytest.raises(RemoteError, match="KV cache of one sequence of 128 tokens") as raised:
                await node.ask(start_request("i1", image))
            assert raised.value.code == "out_of_memory"
            with pytest.raises(RemoteError, match="do not fit the arena of 16777216 bytes"):
                await node.ask(start_request("i2", large))
            with pytest.raises(RemoteError, match="cannot fit the host tier"):
                await node.ask(WarmImage(image=large.ref()))
            record = await node.record()
            assert record.gpu_free_bytes == record.gpu_bytes

    asyncio.run(scenario())


def test_a_repeated_start_joins_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            request = start_request("i1", image)
            both = await asyncio.gather(node.ask(request), node.ask(request))
            assert started(both[0]) == started(both[1])
            assert len(node.engines.made) == 1
            with pytest.raises(RemoteError) as raised:
                await node.ask(start_request("i1", image, function="g"))
            assert raised.value.code == "bad_request"

    asyncio.run(scenario())


def test_a_caller_that_leaves_does_not_end_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            async with node.channel.call(start_request("i1", image)) as call:
                await anext(aiter(call))
            assert started(await node.ask(start_request("i1", image))).instance_id == "i1"

    asyncio.run(scenario())


def test_tokens_come_in_order_and_usage_adds_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            asked = [node.ask(generate("i1", f"r{number}", 50)) for number in range(8)]
            for replies in await asyncio.gather(*asked):
                *messages, usage = replies
                ids = [token for tokens in messages for token in tokens.ids]
                assert ids == continuation(PROMPT, 50)
                assert messages[-1].finish_reason == "length"
                assert not any(message.finish_reason for message in messages[:-1])
                assert isinstance(usage, Usage)
                assert (usage.prompt_tokens, usage.completion_tokens) == (3, 50)
                assert usage.gpu_us == messages[-1].gpu_us > 0
            assert (await node.record()).counters["busy_us"] >= usage.gpu_us

    asyncio.run(scenario())


def test_a_caller_that_leaves_ends_its_sequence(tmp_path: Path) -> None:
    async def scenario() -> None:
        image, gate = make_image("a", SIZE), StepGate()
        async with FakeCluster(tmp_path) as cluster:
            async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
                await cluster.put(image)
                await node.ask(start_request("i1", image))
                gate.release(2)
                async with node.channel.call(generate("i1", tokens=1000)) as call:
                    assert isinstance(await anext(aiter(call)), Tokens)
                gate.open()
                await node.ask(StopInstance(instance_id="i1", grace_s=60.0))
                assert node.engines.made[0].sequences == 0
                assert node.engines.made[0].steps < 1000

    asyncio.run(scenario())


def test_a_stop_lets_work_finish_and_refuses_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        image, gate = make_image("a", SIZE), StepGate()
        async with FakeCluster(tmp_path) as cluster:
            async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
                await cluster.put(image)
                await node.ask(start_request("i1", image))
                gate.release()
                async with node.channel.call(generate("i1")) as call:
                    replies = aiter(call)
                    first = await anext(replies)
                    stopping = asyncio.create_task(node.ask(StopInstance(instance_id="i1")))
                    while not isinstance(refused := await _refusal(node, generate("i1", "r2")), RemoteError):
                        pass
                    assert refused.code == "draining"
                    gate.open()
                    rest = [reply async for reply in replies]
                    assert sum(len(r.ids) for r in [first, *rest[:-1]]) == 6
                assert await stopping == [Done()]
                with pytest.raises(RemoteError) as raised:
                    await node.ask(generate("i1", "r3"))
                assert raised.value.code == "no_such_instance"
                assert await node.ask(StopInstance(instance_id="nobody")) == [Done()]

    asyncio.run(scenario())


def test_a_stop_whose_caller_is_gone_still_ends_the_instance(tmp_path: Path) -> None:
    async def scenario() -> None:
        image, gate = make_image("a", SIZE), StepGate()
        async with FakeCluster(tmp_path) as cluster:
            async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
                await cluster.put(image)
                await node.ask(start_request("i1", image))
                gate.release()
                controller = await Channel.connect((await node.record()).channel, SECRET.encode())
                async with node.channel.call(generate("i1")) as call:
                    replies = aiter(call)
                    await anext(replies)
                    async with controller.call(StopInstance(instance_id="i1", grace_s=60.0)):
                        while not isinstance(await _refusal(node, generate("i1", "r2")), RemoteError):
                            pass
                        await controller.aclose()  # the gateway dies while the instance drains
                    gate.open()
                    rest = [reply async for reply in replies]
                    assert isinstance(rest[-1], Usage)
                # The next controller's stop finds it on its way out, or gone.
                assert await node.ask(StopInstance(instance_id="i1", grace_s=60.0)) == [Done()]
                record = await node.record()
                assert record.gpu_free_bytes == record.gpu_bytes

    asyncio.run(scenario())


def test_a_shorter_stop_overtakes_a_longer_one_and_a_start_without_a_caller_can_be_stopped(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        image, gate = make_image("a", SIZE), StepGate()
        async with FakeCluster(tmp_path) as cluster:
            async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
                await cluster.put(image)
                async with node.channel.call(start_request("i1", image)) as call:
                    await anext(aiter(call))
                assert await node.ask(StopInstance(instance_id="i1")) == [Done()]
                await node.ask(start_request("i2", image))
                gate.release()
                async with node.channel.call(generate("i2", tokens=10_000)) as call:
                    await anext(aiter(call))
                    long = asyncio.create_task(node.ask(StopInstance(instance_id="i2", grace_s=600.0)))
                    short = asyncio.create_task(node.ask(StopInstance(instance_id="i2", grace_s=0.0)))
                    for _ in range(50):  # a step ends now and then, but the work would take far longer
                        gate.release()
                        await node.record()
                    assert await short == await long == [Done()]
                record = await node.record()
                assert record.gpu_free_bytes == record.gpu_bytes

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["store", "peer"])
def test_the_first_bytes_are_told_before_the_last_have_come(tmp_path: Path, way: str) -> None:
    async def scenario() -> None:
        image = make_image("a", 12 << 20)
        async with (
            FakeCluster(tmp_path) as cluster,
            cluster.node("n0", "h0") as first,
            cluster.node("n1", "h1") as second,
        ):
            await cluster.put(image)
            holders = ()
            if way == "peer":
                await first.ask(WarmImage(image=image.ref()))
                holders = (await first.holder(),)
            replies = await second.ask(start_request("i1", image, *holders))
            told = [r.fraction for r in replies if isinstance(r, InstanceProgress) and r.stage == "fetch"]
            assert any(fraction > 0 for fraction in told), replies

    asyncio.run(scenario())


async def _refusal(node, request) -> RemoteError | None:
    """What the node refuses a request with; None if it takes it (the call is left at once)."""
    async with node.channel.call(request) as call:
        try:
            async with asyncio.timeout(0.05):
                await anext(aiter(call))
        except RemoteError as error:
            return error
        except TimeoutError:
            return None
    return None


def test_an_engine_that_fails_takes_its_instance_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            node.engines.made[0].fail_next(RuntimeError("the device is on fire"))
            with pytest.raises(RemoteError, match="on fire"):
                await node.ask(generate("i1"))
            with pytest.raises(RemoteError, match="on fire"):
                await node.ask(start_request("i1", image))
            record = await node.record()
            assert record.gpu_free_bytes == record.gpu_bytes
            (lines,) = await node.ask(TailLogs(function="f"))
            assert isinstance(lines, LogLines)
            assert "on fire" in lines.lines[-1] and "cold start from disk" in " ".join(lines.lines)

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["stop", "leave"])
def test_a_second_stop_cuts_no_draining_short(tmp_path: Path, way: str) -> None:
    async def scenario() -> None:
        image, gate = make_image("a", SIZE), StepGate()
        async with FakeCluster(tmp_path) as cluster:
            async with cluster.node("n0", "h0", engines=FakeEngines(gate=gate)) as node:
                await cluster.put(image)
                await node.ask(start_request("i1", image))
                gate.release()
                stop = StopInstance(instance_id="i1", grace_s=60.0)
                async with node.channel.call(generate("i1")) as call:
                    replies = aiter(call)
                    await anext(replies)
                    stops = [asyncio.create_task(node.ask(stop))]
                    while not isinstance(await _refusal(node, generate("i1", "r2")), RemoteError):
                        pass
                    if way == "stop":
                        stops.append(asyncio.create_task(node.ask(stop)))
                    else:
                        node.stop.set()
                        while (await node.record()).state is not NodeState.DRAINING:
                            pass
                    for _ in range(5):
                        await node.record()
                    gate.open()
                    assert isinstance([reply async for reply in replies][-1], Usage)
                for one in stops:
                    assert await one == [Done()]

    asyncio.run(scenario())


class SteppedClock(SystemClock):
    """A wall clock that is set back by an hour each time it is read."""

    steps = 0

    def wall_s(self) -> float:
        self.steps += 1
        return super().wall_s() - 3600.0 * self.steps


def test_of_an_instance_that_ended_little_is_kept(tmp_path: Path) -> None:
    def kept() -> Counter[str]:
        gc.collect()
        found = gc.get_objects()
        counts = Counter(type(one).__qualname__ for one in found)
        # The loop drops cancelled timers, each with a context, when it has a hundred or their time has come.
        counts["Context"] -= sum(type(one) is asyncio.TimerHandle and one.cancelled() for one in found)
        return counts

    async def scenario() -> tuple[Counter[str], Counter[str]]:
        image = make_image("a", 1 << 20)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)

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
            return await rounds(1, "b"), await rounds(10, "c")

    before, after = asyncio.run(scenario())
    assert after["Instance"] == before["Instance"] + 20
    for name in ("Task", "coroutine", "traceback", "frame", "ImageRef", "Context"):
        assert after[name] <= before[name] + 5, (name, before[name], after[name])


def test_a_clock_that_is_set_back_makes_no_negative_intervals(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster:
            async with cluster.node("n0", "h0", clock=SteppedClock()) as node:
                await cluster.put(image)
                await node.ask(start_request("i1", image))
                await node.ask(StopInstance(instance_id="i1"))
            intervals = await cluster.state.intervals()
            assert {one.state for one in intervals} == {"starting", "loading", "ready", "draining"}
            assert all(0.0 <= one.to_at - one.from_at < 60.0 for one in intervals)

    asyncio.run(scenario())


def test_handlers_are_refused_unless_allowed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            assets = {"function.yaml": (FUNCTIONS / "echo" / "function.yaml").read_bytes()}
            with pytest.raises(RemoteError) as raised:
                await node.ask(start_request("i1", None, task="handler", assets=assets))
            assert raised.value.code == "handler_not_allowed"

    asyncio.run(scenario())


def test_a_handler_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = Path(__file__).parent.parent / "functions" / "echo"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    async def scenario() -> None:
        async with FakeCluster(tmp_path) as cluster:
            async with cluster.node("n0", "h0", "--allow-handlers") as node:
                await node.ask(start_request("i1", None, task="handler", assets=files))
                request = InvokeHandler(request_id="r1", instance_id="i1", body=b'{"hello": 1}')
                *chunks, usage = await node.ask(request)
                assert b"hello" in b"".join(chunk.data for chunk in chunks)
                assert isinstance(usage, Usage)
                with pytest.raises(RemoteError) as raised:
                    await node.ask(generate("i1"))
                assert raised.value.code == "bad_request"

    asyncio.run(scenario())


def test_work_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            for request, code in (
                (generate("nobody"), "no_such_instance"),
                (InvokeHandler(request_id="r", instance_id="i1", body=b"1"), "bad_request"),
                (Compute(request_id="r", instance_id="i1", kind="embed", token_ids=((1,),)), "internal"),
                (DropImage(image=image.digest, tier="moon"), "bad_request"),
                (start_request("i3", None), "bad_request"),
                (start_request("i4", image, assets={}), "start_failed"),
            ):
                with pytest.raises(RemoteError) as raised:
                    await node.ask(request)
                assert raised.value.code == code, request
            (done,) = await node.ask(DropImage(image=image.digest, tier="gpu"))
            assert done == Done(detail="in use, or not here")

    asyncio.run(scenario())


def test_an_idle_image_stays_hot_until_its_room_is_needed(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = make_image("a", 9 << 20), make_image("b", 9 << 20)
        async with FakeCluster(tmp_path) as cluster:
            flags = ("--keep-hot", "1h", "--host-memory", "32MiB")
            async with cluster.node("n0", "h0", *flags) as node:
                await cluster.put(first)
                await cluster.put(second)
                await node.ask(start_request("i1", first))
                await node.ask(StopInstance(instance_id="i1"))
                assert started(await node.ask(start_request("i2", first))).start_kind == "hot"
                await node.ask(StopInstance(instance_id="i2"))
                assert started(await node.ask(start_request("i3", second))).start_kind == "cold"
                record = await node.record()
                assert {h.image: h.tiers for h in record.holdings} == {
                    first.digest: (Tier.HOST,),
                    second.digest: (Tier.GPU, Tier.HOST),
                }
                assert record.counters["evictions"] == 1

    asyncio.run(scenario())


def test_logs_can_be_followed(tmp_path: Path) -> None:
    async def scenario() -> None:
        image = make_image("a", SIZE)
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            await cluster.put(image)
            async with node.channel.call(TailLogs(function="f", follow=True)) as call:
                await node.ask(start_request("i1", image))
                async for reply in call:
                    if any("ready" in line for line in reply.lines):
                        break

    asyncio.run(scenario())


def test_a_node_that_leaves_finishes_its_work_first(tmp_path: Path) -> None:
    async def scenario() -> None:
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
                    assert isinstance([reply async for reply in replies][-1], Usage)
                await node.task
                with pytest.raises(ChannelClosed):
                    await node.record()
            snapshot = await cluster.state.snapshot()
            assert snapshot.nodes == () and snapshot.instances == ()
            states = [interval.state for interval in await cluster.state.intervals()]
            assert states == ["starting", "loading", "ready", "draining"]

    asyncio.run(scenario())
