"""Images that arrive in the arena itself, on CPU nodes and on a device that only copies reach."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from invoker.engine.contract import DeviceRegion, GenerateEngine, ModelSpec
from invoker.memory.arena import Region
from registry.errors import RemoteError
from registry.messages.images import DropImage, WarmImage
from registry.messages.node import Acknowledged, InstanceProgress, StopInstance
from registry.records.node import Tier
from tests.fixtures.device_driver import Devices
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.invoker import (
    FakeCluster,
    FakeEngines,
    FakeImage,
    FakeNode,
    make_image,
    start_request,
    started,
    two_nodes,
)
from tests.fixtures.patience import PATIENCE_S

MIB = 1 << 20
SIZE = 3 * MIB + 1234
SLOW = ("--link-rate", "16mbit")


def files(cluster: FakeCluster, host: str) -> set[str]:
    """Return the images in a host tier, complete or not."""
    return {path.name for path in (cluster.shm / host).iterdir() if len(path.stem) == 64}


async def tiers(node: FakeNode) -> list[tuple[Tier, ...]]:
    return [holding.tiers for holding in (await node.record()).holdings]


async def held(node: FakeNode, *wanted: tuple[Tier, ...]) -> None:
    """Return once the node has one image, in these tiers."""
    async with asyncio.timeout(PATIENCE_S):
        while await tiers(node) != list(wanted):
            pass


async def receiving(node: FakeNode) -> None:
    """Return once the node has received something."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await node.record()).counters["cast_recv_bytes"]:
            pass


@dataclass
class DeviceEngines(FakeEngines):
    """Engines of a node whose arena is of `devices`."""

    devices: Devices | None = None

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine:
        assert region.buffer is None and isinstance(region, Region) and self.devices is not None
        content = self.devices.driver.content(region)
        assert hashlib.sha256(content).hexdigest() == spec.manifest.sha256
        self.made.append(FakeEngine())
        return self.made[-1]


@asynccontextmanager
async def slow_holder(
    folder: Path, image: FakeImage, *hosts: str
) -> AsyncIterator[tuple[FakeCluster, FakeNode, list[FakeNode]]]:
    """Yield a cluster, a node that sends its host copy of the image slowly, and one on each of the hosts."""
    async with FakeCluster(folder) as cluster, AsyncExitStack() as stack:
        first = await stack.enter_async_context(cluster.node("n0", "h0", *SLOW))
        others = [
            await stack.enter_async_context(cluster.node(f"n{number}", host))
            for number, host in enumerate(hosts, 1)
        ]
        await cluster.put(image)
        await first.ask(WarmImage(image=image.ref()))
        yield cluster, first, others


async def test_a_start_from_a_peer_makes_no_copy_in_host_memory(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with two_nodes(tmp_path, image, *SLOW) as (cluster, first, second):
        await first.ask(WarmImage(image=image.ref()))
        seen = set[str]()
        request = start_request("i1", image, await first.holder())
        replies = await second.ask(request, lambda _: seen.update(files(cluster, "h1")))
        assert started(replies).start_kind == "cold" and len(replies) > 3
        assert not seen and not files(cluster, "h1")
        record = await second.record()
        assert await tiers(second) == [(Tier.GPU,)] and record.host_free_bytes == record.host_bytes
        assert record.counters["cast_recv_bytes"] == SIZE


async def test_a_start_from_the_store_arrives_in_the_arena_too(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
        await cluster.put(image)
        assert started(await node.ask(start_request("i1", image))).start_kind == "cold"
        assert await tiers(node) == [(Tier.GPU,)] and not files(cluster, "h0")


async def test_peers_read_an_image_from_the_arena_in_which_it_arrives(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with slow_holder(tmp_path, image, "h1", "h2") as (_, first, (second, third)):
        request = start_request("i1", image, await first.holder())
        async with second.channel.call(request) as call:
            replies = aiter(call)
            reply = await anext(replies)
            while not (isinstance(reply, InstanceProgress) and reply.fraction > 0):
                reply = await anext(replies)
            assert reply.fraction < 1
            third_start = start_request("i2", image, await second.holder("gpu"))
            following = asyncio.create_task(third.ask(third_start))
            async for _ in replies:
                pass
            started(await following)
        assert (await second.record()).counters["cast_sent_bytes"] >= SIZE
        assert (await third.record()).counters["disk_read_bytes"] == 0


async def test_nodes_of_a_host_read_what_arrives_in_the_arena_of_another(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with slow_holder(tmp_path, image, "h1", "h1") as (cluster, first, (second, third)):
        source, near = await first.holder(), await second.holder()
        both = await asyncio.gather(
            second.ask(start_request("i1", image, source)),
            third.ask(start_request("i2", image, near, source)),
        )
        assert [started(replies).start_kind for replies in both] == ["cold", "cold"]
        assert not files(cluster, "h1")
        assert (await third.record()).counters["disk_read_bytes"] == 0


async def test_who_wants_it_in_host_memory_waits_and_copies_it_from_the_arena(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with two_nodes(tmp_path, image, *SLOW) as (_, first, second):
        await first.ask(WarmImage(image=image.ref()))
        holder = await first.holder()
        starting = asyncio.create_task(second.ask(start_request("i1", image, holder)))
        await receiving(second)
        (last,) = (await second.ask(WarmImage(image=image.ref(holder))))[-1:]
        assert isinstance(last, Acknowledged) and "from arena" in last.detail
        started(await starting)
        record = await second.record()
        assert record.counters["cast_recv_bytes"] == SIZE
        assert await tiers(second) == [(Tier.GPU, Tier.HOST)]


async def test_a_start_joins_a_load_into_host_memory(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with two_nodes(tmp_path, image, *SLOW) as (_, first, second):
        await first.ask(WarmImage(image=image.ref()))
        holder = await first.holder()
        warming = asyncio.create_task(second.ask(WarmImage(image=image.ref(holder))))
        await receiving(second)
        started(await second.ask(start_request("i1", image, holder)))
        await warming
        assert (await second.record()).counters["cast_recv_bytes"] == SIZE
        assert await tiers(second) == [(Tier.GPU, Tier.HOST)]


async def test_what_a_dead_process_left_in_host_memory_is_used(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
        await cluster.put(image)
        with (cluster.shm / "h0" / f"{image.digest}.part").open("wb") as orphan:
            orphan.write(image.data[: 2 * MIB])
            orphan.truncate(SIZE)
        started(await node.ask(start_request("i1", image)))
        assert await tiers(node) == [(Tier.GPU, Tier.HOST)]
        assert (await node.record()).counters["disk_read_bytes"] == SIZE - 2 * MIB


@pytest.mark.parametrize("how", ["stopped", "failed"])
async def test_a_start_that_ends_early_frees_its_place_and_serves_nothing(tmp_path: Path, how: str) -> None:
    image = make_image("a", SIZE)
    async with (
        FakeCluster(tmp_path) as cluster,
        cluster.node("n1", "h1") as second,
    ):
        async with cluster.node("n0", "h0", *SLOW) as first:
            await cluster.put(image)
            await first.ask(WarmImage(image=image.ref()))
            cluster.blob(image).unlink()
            request = start_request("i1", image, await first.holder())
            starting = asyncio.create_task(second.ask(request))
            await receiving(second)
            if how == "stopped":
                await second.ask(StopInstance(instance_id="i1"))
        with pytest.raises(RemoteError):
            await starting
        record = await second.record()
        assert record.holdings == () and record.gpu_free_bytes == record.gpu_bytes
        async with cluster.node("n2", "h2") as third:
            with pytest.raises(RemoteError, match="cannot be loaded"):
                async with asyncio.timeout(PATIENCE_S):
                    await third.ask(start_request("i2", image, await second.holder("gpu")))
        await cluster.put(image)
        started(await second.ask(start_request("i3", image)))


async def test_an_image_that_is_only_in_the_arena_gets_to_the_disk(tmp_path: Path) -> None:
    image = make_image("a", SIZE)
    flags = ("--disk-cache", "64MiB", "--disk-cache-dir", str(tmp_path / "disk"))
    async with FakeCluster(tmp_path, settle_s=0.0) as cluster, cluster.node("n0", "h0", *flags) as node:
        await cluster.put(image)
        started(await node.ask(start_request("i1", image)))
        await held(node, (Tier.GPU, Tier.DISK))
        (written,) = (tmp_path / "disk").rglob(image.digest)
        assert written.read_bytes() == image.data and not files(cluster, "h0")


async def loaded_on_devices(cluster: FakeCluster, node: FakeNode, image: FakeImage, devices: Devices) -> None:
    """Check that a device got the image through page-locked memory, allocated once."""
    assert await tiers(node) == [(Tier.GPU,)]
    assert not devices.driver.broken and not devices.driver.unpinned_bytes
    assert devices.driver.pinnings == 1


async def test_a_device_is_filled_through_page_locked_memory_and_served_from_alone(tmp_path: Path) -> None:
    """One start reads the store; the next ones a device that alone has the image, and one that is loading."""
    image = make_image("a", SIZE)
    devices = [Devices() for _ in range(3)]
    async with (
        FakeCluster(tmp_path) as cluster,
        cluster.node(
            "n0", "h0", *SLOW, make_arena=devices[0], engines=DeviceEngines(devices=devices[0])
        ) as first,
        cluster.node("n1", "h1", make_arena=devices[1], engines=DeviceEngines(devices=devices[1])) as second,
        cluster.node("n2", "h2", make_arena=devices[2], engines=DeviceEngines(devices=devices[2])) as third,
    ):
        blob = await cluster.put(image)
        started(await first.ask(start_request("i0", image)))
        blob.unlink()
        await loaded_on_devices(cluster, first, image, devices[0])
        request = start_request("i1", image, await first.holder("gpu"))
        starting = asyncio.create_task(second.ask(request))
        await receiving(second)
        started(await third.ask(start_request("i2", image, await second.holder("gpu"))))
        started(await starting)
        for node, used in zip((first, second, third), devices, strict=True):
            await loaded_on_devices(cluster, node, image, used)
        for host in ("h0", "h1", "h2"):
            assert not files(cluster, host)


async def test_a_warm_start_of_a_device_copies_through_the_same_memory(tmp_path: Path) -> None:
    image, devices = make_image("a", SIZE), Devices()
    engines = DeviceEngines(devices=devices)
    async with (
        FakeCluster(tmp_path) as cluster,
        cluster.node("n0", "h0", "--keep-hot", "0s", make_arena=devices, engines=engines) as node,
    ):
        await cluster.put(image)
        await node.ask(WarmImage(image=image.ref()))
        for name in ("i1", "i2"):
            assert started(await node.ask(start_request(name, image))).start_kind == "warm"
            await node.ask(StopInstance(instance_id=name))
        assert devices.driver.pinnings == 1 and not devices.driver.unpinned_bytes
        assert not devices.driver.broken


async def test_what_only_a_device_has_returns_to_host_memory_when_it_is_idle(tmp_path: Path) -> None:
    image, devices = make_image("a", SIZE), Devices()
    engines = DeviceEngines(devices=devices)
    async with (
        FakeCluster(tmp_path) as cluster,
        cluster.node("n0", "h0", "--keep-hot", "0s", make_arena=devices, engines=engines) as node,
    ):
        await cluster.put(image)
        await node.ask(start_request("i1", image))
        await node.ask(StopInstance(instance_id="i1"))
        await held(node, (Tier.HOST,))
        assert (cluster.shm / "h0" / image.digest).read_bytes() == image.data


async def test_blocks_larger_than_the_page_locked_memory_fail_with_the_sizes(
    tmp_path: Path,
) -> None:
    image, devices = make_image("a", SIZE), Devices(pinned_bytes=64 << 10)
    engines = DeviceEngines(devices=devices)
    async with (
        FakeCluster(tmp_path) as cluster,
        cluster.node("n0", "h0", make_arena=devices, engines=engines) as node,
    ):
        await cluster.put(image)
        with pytest.raises(RemoteError, match="do not fit the pinned memory of 49152 bytes"):
            await node.ask(start_request("i1", image))
        record = await node.record()
        assert record.gpu_free_bytes == record.gpu_bytes
        (done,) = await node.ask(DropImage(image=image.digest, tier="gpu"))
        assert done == Acknowledged(detail="in use, or not cached")
