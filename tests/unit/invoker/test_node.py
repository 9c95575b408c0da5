"""A node from outside: starts from every tier, the work it does, its life cycle."""

import asyncio
import os
import time
from itertools import count
from pathlib import Path

import pytest

from registry.clock import SystemClock
from registry.errors import RemoteError
from registry.messages.images import DropImage, WarmImage
from registry.messages.node import (
    Acknowledged,
    Compute,
    InstanceProgress,
    InvokeHandler,
    RequestUsage,
    StopInstance,
    TailLogs,
)
from registry.records.fence import Fence
from registry.records.instance import InstanceState
from registry.records.node import Tier
from tests.fixtures.fake_engine import continuation
from tests.fixtures.invoker import (
    KIB,
    PROMPT,
    FakeCluster,
    FakeEngines,
    generate,
    make_image,
    one_node,
    serving,
    start_request,
    started,
    two_nodes,
)

FUNCTIONS = Path(__file__).resolve().parents[3] / "functions"

SIZE = 3 * 1024 * KIB + 1234


async def test_cold_from_the_store_then_hot_then_warm(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image, "--keep-hot", "0s") as (cluster, node):
        cold = started(await node.ask(start_request("i1", image, host_copy=True)))
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


async def test_a_cold_start_from_another_host_reads_no_disk(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with two_nodes(tmp_path, image) as (cluster, first, second):
        await first.ask(start_request("i1", image))
        cold = started(await second.ask(start_request("i2", image, await first.holder())))
        assert cold.start_kind == "cold"
        counters = (await second.record()).counters
        assert counters["disk_read_bytes"] == 0 and counters["cast_recv_bytes"] == SIZE
        assert (await first.record()).counters["cast_sent_bytes"] >= SIZE
        (record,) = (r for r in (await cluster.state.snapshot()).instances if r.instance_id == "i2")
        assert record.source == "node:n0" and record.state is InstanceState.READY


async def test_nodes_of_one_host_share_the_copy(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with two_nodes(tmp_path, image, host="h0") as (cluster, first, second):
        both = await asyncio.gather(
            first.ask(start_request("i1", image, host_copy=True)),
            second.ask(start_request("i2", image, host_copy=True)),
        )
        assert {started(replies).start_kind for replies in both} <= {"cold", "warm"}
        read = [(await node.record()).counters["disk_read_bytes"] for node in (first, second)]
        assert sorted(read) == [0, SIZE]
        (only,) = [path.name for path in (cluster.shm / "h0").iterdir() if len(path.name) >= 64]
        assert only == image.digest
        records = [await node.record() for node in (first, second)]
        assert {record.host_free_bytes for record in records} == {records[0].host_bytes - SIZE}


async def test_the_accelerator_serves_an_image_that_left_host_memory(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with two_nodes(tmp_path, image) as (cluster, first, second):
        blob = cluster.blob(image)
        await first.ask(start_request("i1", image, host_copy=True))
        blob.unlink()
        (done,) = await first.ask(DropImage(image=image.digest, tier="host"))
        assert done == Acknowledged(detail="dropped")
        assert (await first.record()).holdings[0].tiers == (Tier.GPU,)
        await second.ask(WarmImage(image=image.ref(await first.holder("gpu")), function="f"))
        assert (await second.record()).holdings[0].tiers == (Tier.HOST,)
        replies = await first.ask(WarmImage(image=image.ref()))
        assert isinstance(replies[-1], Acknowledged) and "from arena" in replies[-1].detail


async def test_when_the_holders_fail_the_store_is_read(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image) as (cluster, node):
        async with cluster.node("n1", "h1") as other:
            gone = await other.holder()
        await node.ask(start_request("i1", image, gone))
        assert (await node.record()).counters["disk_read_bytes"] == SIZE


async def test_damage_in_the_store_fails_the_start_and_names_the_units(tmp_path: Path) -> None:
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


async def test_too_little_memory_is_said_with_numbers(tmp_path: Path) -> None:
    small = FakeEngines(kv=(15 << 20, 15 << 20))
    image, large = make_image("a", SIZE), make_image("b", 17 << 20)
    async with one_node(tmp_path, image, engines=small) as (_, node):
        with pytest.raises(RemoteError, match="KV cache of one sequence of 128 tokens") as raised:
            await node.ask(start_request("i1", image))
        assert raised.value.code == "out_of_memory"
        with pytest.raises(RemoteError, match="do not fit the arena of 16777216 bytes"):
            await node.ask(start_request("i2", large))
        with pytest.raises(RemoteError, match="cannot fit the host tier"):
            await node.ask(WarmImage(image=large.ref()))
        record = await node.record()
        assert record.gpu_free_bytes == record.gpu_bytes


async def test_a_repeated_start_joins_the_first(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image) as (_, node):
        request = start_request("i1", image)
        both = await asyncio.gather(node.ask(request), node.ask(request))
        assert started(both[0]) == started(both[1])
        assert len(node.engines.made) == 1
        with pytest.raises(RemoteError) as raised:
            await node.ask(start_request("i1", image, function="g"))
        assert raised.value.code == "bad_request"


async def test_starts_of_an_earlier_controller_are_refused(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image) as (_, node):
        names = (f"i{number}" for number in count())

        async def obeys(incarnation: str, epoch: int) -> bool:
            fence = {"controller_incarnation": incarnation, "controller_epoch": epoch}
            try:
                await node.ask(start_request(next(names), image, **fence))
            except RemoteError as error:
                assert error.code == "bad_request" and "replaced by a newer one" in error.message
                return False
            return True

        assert await obeys("", 7)  # of an earlier release
        assert await obeys("1", 7)
        assert not await obeys("1", 6) and not await obeys("", 6)
        assert await obeys("2", 1)  # Redis lost its state
        assert not await obeys("1", 8)  # the controller of the lost state
        assert (await node.record()).controller == Fence("2", 1)


async def test_tokens_come_in_order_and_usage_adds_up(tmp_path: Path) -> None:
    async with serving(tmp_path, SIZE) as node:
        asked = [node.ask(generate("i1", f"r{number}", 50)) for number in range(8)]
        for replies in await asyncio.gather(*asked):
            *messages, usage = replies
            ids = [token for tokens in messages for token in tokens.ids]
            assert ids == continuation(PROMPT, 50)
            assert messages[-1].finish_reason == "length"
            assert not any(message.finish_reason for message in messages[:-1])
            assert isinstance(usage, RequestUsage)
            assert (usage.prompt_tokens, usage.completion_tokens) == (3, 50)
            assert usage.gpu_us == messages[-1].gpu_us > 0
        assert (await node.record()).counters["busy_us"] >= usage.gpu_us


@pytest.mark.parametrize("way", ["store", "peer"])
async def test_the_first_bytes_are_told_before_the_last_have_come(tmp_path: Path, way: str) -> None:
    image = make_image("a", 12 << 20)
    async with two_nodes(tmp_path, image) as (_, first, second):
        holders = ()
        if way == "peer":
            await first.ask(WarmImage(image=image.ref()))
            holders = (await first.holder(),)
        replies = await second.ask(start_request("i1", image, *holders))
        reported = [r.fraction for r in replies if isinstance(r, InstanceProgress) and r.stage == "fetch"]
        assert any(fraction > 0 for fraction in reported), replies


class SteppedClock(SystemClock):
    """A wall clock that is set back by an hour each time it is read."""

    steps = 0

    def wall_s(self) -> float:
        self.steps += 1
        return super().wall_s() - 3600.0 * self.steps


async def test_a_clock_that_is_set_back_makes_no_negative_intervals(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with FakeCluster(tmp_path) as cluster:
        async with cluster.node("n0", "h0", clock=SteppedClock()) as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image))
            await node.ask(StopInstance(instance_id="i1"))
        intervals = await cluster.state.intervals()
        assert {one.state for one in intervals} == {"starting", "loading", "ready", "draining"}
        assert all(0.0 <= one.to_at - one.from_at < 60.0 for one in intervals)


async def test_handlers_are_refused_unless_allowed(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
        assets = {"function.yaml": (FUNCTIONS / "echo" / "function.yaml").read_bytes()}
        with pytest.raises(RemoteError) as raised:
            await node.ask(start_request("i1", None, task="handler", assets=assets))
        assert raised.value.code == "handler_not_allowed"


async def test_a_handler_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    folder = FUNCTIONS / "echo"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    async with FakeCluster(tmp_path) as cluster:
        async with cluster.node("n0", "h0", "--allow-handlers", "--allow-unconfined-handlers") as node:
            await node.ask(start_request("i1", None, task="handler", assets=files))
            request = InvokeHandler(request_id="r1", instance_id="i1", body=b'{"hello": 1}')
            (chunk,) = await node.ask(request)
            assert b"hello" in chunk.data
            assert isinstance(chunk.usage, RequestUsage)
            with pytest.raises(RemoteError) as raised:
                await node.ask(generate("i1"))
            assert raised.value.code == "bad_request"


async def test_work_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image) as (_, node):
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
        assert done == Acknowledged(detail="in use, or not cached")


@pytest.mark.parametrize("keep_hot", ["0s", "1h"])
async def test_a_host_copy_was_last_used_when_its_instance_ended(tmp_path: Path, keep_hot: str) -> None:
    image = make_image("a", SIZE)
    async with FakeCluster(tmp_path) as cluster:
        async with cluster.node("n0", "h0", "--keep-hot", keep_hot) as node:
            await cluster.put(image)
            await node.ask(start_request("i1", image, host_copy=True))
            loaded_at = 1000.0
            os.utime(cluster.shm / "h0" / image.digest, (loaded_at, loaded_at))  # long ago
            stopped_at = time.time()
            await node.ask(StopInstance(instance_id="i1"))
            (held,) = (await node.record()).holdings
            assert held.last_used_at > stopped_at - 1.0


async def test_an_idle_image_stays_hot_until_its_room_is_needed(tmp_path: Path) -> None:
    first, second = make_image("a", 9 << 20), make_image("b", 9 << 20)
    async with FakeCluster(tmp_path) as cluster:
        flags = ("--keep-hot", "1h", "--host-memory", "32MiB")
        async with cluster.node("n0", "h0", *flags) as node:
            await cluster.put(first)
            await cluster.put(second)
            await node.ask(start_request("i1", first, host_copy=True))
            await node.ask(StopInstance(instance_id="i1"))
            assert started(await node.ask(start_request("i2", first))).start_kind == "hot"
            await node.ask(StopInstance(instance_id="i2"))
            cold = started(await node.ask(start_request("i3", second, host_copy=True)))
            assert cold.start_kind == "cold"
            record = await node.record()
            assert {h.image: h.tiers for h in record.holdings} == {
                first.digest: (Tier.HOST,),
                second.digest: (Tier.GPU, Tier.HOST),
            }
            assert record.counters["evictions"] == 1


async def test_logs_can_be_followed(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with one_node(tmp_path, image) as (_, node):
        async with node.channel.call(TailLogs(function="f", follow=True)) as call:
            await node.ask(start_request("i1", image))
            async for reply in call:
                if any("ready" in line for line in reply.lines):
                    break
