"""Loads that are shared, watched and left."""

import asyncio
import fcntl
import gc
import os
import threading
from pathlib import Path

import pytest

from invoker.base.counters import Counters
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
from invoker.loading.cast_fetch import CastContext, from_peers
from invoker.loading.loader import ImageLoader
from invoker.loading.partial_image import PartialImage
from rdmacast.cast.links import CastLinks
from rdmacast.cast.record import CastMember
from rdmacast.errors import BlocksLost
from rdmacast.fakes.transport import MemoryNetwork, MemoryTransport, MemoryWatcher
from rdmacast.server.region import GrowingRegion
from rdmacast.transport import PeerAddress
from rdmacast.transports.connector import Connector
from registry.clock import SystemClock
from registry.errors import RemoteError
from registry.messages.images import DropImage, WarmImage
from registry.messages.node import Acknowledged, InstanceProgress, InstanceStarted, StopInstance
from registry.records.change import NodeUp
from registry.records.node import Tier
from tests.fixtures.invoker import FakeCluster, make_image, start_request, two_nodes
from tests.fixtures.patience import PATIENCE_S

SLOW = ("--link-rate", "8mbit")


async def test_a_load_goes_on_while_somebody_wants_it_and_ends_when_nobody_does(tmp_path: Path) -> None:
    image = make_image("a", 2 << 20)
    async with two_nodes(tmp_path, image, *SLOW) as (cluster, first, second):
        await first.ask(WarmImage(image=image.ref()))
        request = WarmImage(image=image.ref(await first.holder()))
        folder = cluster.shm / "h1"
        async with second.channel.call(request) as one, second.channel.call(request) as two:
            ones, twos = aiter(one), aiter(two)
            fractions = [(await anext(ones)).fraction, (await anext(twos)).fraction]
            await one.__aexit__(None, None, None)
            async for reply in twos:
                assert isinstance(reply, InstanceProgress)
                fractions.append(reply.fraction)
                if len(fractions) > 3:
                    break
            assert fractions[2:] == sorted(fractions[2:]) and fractions[-1] < 1.0
            assert (folder / f"{image.digest}.part").exists()
        while (folder / f"{image.digest}.part").exists():
            await second.record()
        record = await second.record()
        assert record.host_free_bytes == record.host_bytes and record.holdings == ()
        assert record.counters["disk_read_bytes"] == 0


async def test_nothing_is_kept_of_images_that_nobody_asks_for_any_more(tmp_path: Path) -> None:
    image = make_image("a", 1 << 20)
    async with two_nodes(tmp_path, image) as (_, first, _second):
        await asyncio.gather(*(first.ask(WarmImage(image=image.ref())) for _ in range(3)))
        await first.ask(DropImage(image=image.digest, tier="host"))
        loaders = [one for one in gc.get_objects() if type(one) is ImageLoader]
        assert {repr(loader) for loader in loaders} == {"<ImageLoader [] entering=0>"}


async def test_a_third_host_reads_from_one_that_is_still_loading(tmp_path: Path) -> None:
    image = make_image("a", 1 << 20)
    async with (
        FakeCluster(tmp_path) as cluster,
        cluster.node("n0", "h0") as first,
        cluster.node("n1", "h1", *SLOW) as second,
        cluster.node("n2", "h2") as third,
    ):
        await cluster.put(image)
        await first.ask(WarmImage(image=image.ref()))
        request = WarmImage(image=image.ref(await first.holder()))
        async with second.channel.call(request) as call:
            replies = aiter(call)
            await anext(replies)
            third_request = WarmImage(image=image.ref(await second.holder()))
            following = asyncio.create_task(third.ask(third_request))
            async for _ in replies:
                pass
            await following
        counters = (await third.record()).counters
        assert counters["cast_recv_bytes"] == len(image.data) and counters["disk_read_bytes"] == 0


@pytest.mark.parametrize("what", ["warm", "start"])
async def test_who_comes_while_a_load_is_being_stopped_gets_one_of_its_own(tmp_path: Path, what: str) -> None:
    image = make_image("a", 1 << 20)
    async with two_nodes(tmp_path, image, *SLOW) as (_, first, second):
        await first.ask(WarmImage(image=image.ref()))
        holder = await first.holder()
        request = WarmImage(image=image.ref(holder))
        async with second.channel.call(request) as call:
            replies = aiter(call)
            await anext(replies)
            await anext(replies)
        # The call was given up: its load is on its way out when the next one comes.
        again = request if what == "warm" else start_request("i1", image, holder)
        async with asyncio.timeout(PATIENCE_S):
            last = (await second.ask(again))[-1]
        assert isinstance(last, Acknowledged | InstanceStarted)  # the engine has checked the region's bytes
        assert (await second.record()).holdings[0].image == image.digest


async def test_evicted_images_give_their_memory_back_at_once(tmp_path: Path) -> None:
    def deleted(cluster: FakeCluster) -> int:
        # A spare that was discarded is mapped until the thread that took its pages has noticed.
        for thread in threading.enumerate():
            if thread.name == "spare-prefault":
                thread.join()
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("(deleted)" in line and cluster.id in line for line in maps)

    gc.disable()
    try:
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0") as node:
            for number in range(6):
                image = make_image(f"x{number}", 6 << 20)
                blob = await cluster.put(image)
                await node.ask(WarmImage(image=image.ref()))
                assert deleted(cluster) == 0
            assert (await node.record()).counters["evictions"] == 4
            broken = make_image("broken", 6 << 20)
            blob = await cluster.put(broken)
            blob.write_bytes(broken.data[:-1] + bytes([broken.data[-1] ^ 1]))
            with pytest.raises(RemoteError, match="damaged"):
                await node.ask(start_request("i1", broken))
            assert deleted(cluster) == 0
            await node.ask(start_request("i2", image))
            assert deleted(cluster) == 0
    finally:
        gc.enable()


async def test_an_idle_image_without_a_host_copy_returns_to_host_memory(tmp_path: Path) -> None:
    image = make_image("a", 3 << 20)
    async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0", "--keep-hot", "0s") as node:
        await cluster.put(image)
        await node.ask(start_request("i1", image))
        await node.ask(DropImage(image=image.digest, tier="host"))
        (holding,) = (await node.record()).holdings
        assert holding.tiers == (Tier.GPU,)
        cursor = (await cluster.state.snapshot()).cursor
        await node.ask(StopInstance(instance_id="i1"))
        async for _, change in cluster.state.watch(cursor):
            record = change.record if isinstance(change, NodeUp) else None
            if record and record.gpu_free_bytes == record.gpu_bytes:
                break
        assert record is not None
        (holding,) = record.holdings
        assert holding.tiers == (Tier.HOST,)
        assert (cluster.shm / "h0" / image.digest).read_bytes() == image.data
        counters = record.counters
        assert counters["disk_read_bytes"] == len(image.data) and counters["store_read_bytes"] == 0


async def test_an_idle_image_is_freed_at_once_where_host_memory_is_full(tmp_path: Path) -> None:
    image, other = make_image("a", 9 << 20), make_image("b", 9 << 20)
    async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0", "--keep-hot", "0s") as node:
        for one in (image, other):
            await cluster.put(one)
        await node.ask(start_request("i1", image))
        await node.ask(DropImage(image=image.digest, tier="host"))
        await node.ask(WarmImage(image=other.ref()))
        await node.ask(StopInstance(instance_id="i1"))
        record = await node.record()
        assert record.gpu_free_bytes == record.gpu_bytes
        assert [holding.image for holding in record.holdings] == [other.digest]


async def test_a_load_left_while_it_is_published_holds_no_image(tmp_path: Path) -> None:
    image = make_image("a", 512 << 10)
    async with two_nodes(tmp_path, image, *SLOW) as (cluster, first, node):
        await first.ask(WarmImage(image=image.ref()))
        folder = cluster.shm / "h1"
        async with node.channel.call(WarmImage(image=image.ref(await first.holder()))) as call:
            replies = aiter(call)
            await anext(replies)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a peer does for a moment
            while (await first.record()).counters["cast_sent_bytes"] < 512 << 10:
                await node.record()
        await node.record()  # the node has heard that the caller left
        os.close(lock)
        while (folder / f"{image.digest}.part").exists():
            await node.record()
        async with asyncio.timeout(PATIENCE_S):
            while (folder / image.digest).exists():
                await node.ask(DropImage(image=image.digest, tier="host"))


async def test_a_peer_from_which_nothing_comes_is_given_up(tmp_path: Path) -> None:
    image = make_image("a", 4 << 20)
    network, growing = MemoryNetwork(), GrowingRegion(image.data)
    growing.mark(0, len(image.data) // 2)
    stuck_at = network.add(PeerAddress(url="tcp://stuck:1", host="a"), {image.digest: growing})
    complete = GrowingRegion(image.data, complete=True)
    sound_at = network.add(PeerAddress(url="tcp://sound:1", host="b"), {image.digest: complete})
    context = CastContext(
        node="z",
        links=CastLinks(
            connector=Connector("z", [MemoryTransport(network, name="tcp")]), watcher=MemoryWatcher(network)
        ),
        counters=Counters(),
        clock=SystemClock(),
        publish=lambda progress: None,
    )
    stuck, sound = (
        CastMember(node=peer.host, host=peer.host, address=peer.url) for peer in (stuck_at, sound_at)
    )
    tier = HostTier(tmp_path / "h0", 16 << 20)
    writer = tier.begin(image.digest, len(image.data))
    assert isinstance(writer, ImageWriter)
    target = PartialImage(writer, image.manifest, lambda arrived: None)
    with pytest.raises(BlocksLost, match="no block after"):
        await from_peers([stuck], target, context, stall_s=0.2)
    report = await from_peers([stuck, sound], target, context, stall_s=1.0)
    assert target.is_complete and "b" in report.bytes_by_peer
    tier.close()
