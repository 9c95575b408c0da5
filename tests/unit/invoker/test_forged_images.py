"""A peer that serves other bytes with right checksums of units: found by the SHA-256 of the whole."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from benchmarks.harness.no_server import EmptyArena
from invoker.base.counters import Counters
from invoker.host_tier.tier import HostTier
from invoker.loading.image_checks import ImageChecks
from invoker.loading.image_copies import ImageCopies, ImageCopy
from rdmacast.aio.groups import cancel_and_wait
from registry.errors import RemoteError
from registry.images.verify import unit_checksums
from registry.messages.images import WarmImage
from registry.records.node import Tier
from tests.fixtures.host_tier import begin, digest, fill
from tests.fixtures.invoker import (
    FakeCluster,
    FakeEngines,
    FakeImage,
    FakeNode,
    generate,
    image_of,
    make_image,
    start_request,
)
from tests.fixtures.patience import PATIENCE_S

OpenTier = Callable[..., HostTier]
FORGED_AT = (5, 69)  # in the first words of two stripes of 64 bytes
SETTLE_S = 0.05


def forgeable() -> FakeImage:
    """Return an image with a collision in its first unit.

    XXH3 adds words of data to its lanes, and products of the halves of (word xor secret). Two words of one
    lane have halves equal to those of the secret here, so their products are 0 and only their sum counts.
    """
    data = bytearray(make_image("a", 1 << 20).data)
    for at, secret, byte in zip(FORGED_AT, ("b8fe6c39", "7c01812c"), (0, 1), strict=True):
        data[at - 5 : at - 1] = bytes.fromhex(secret)
        data[at] = byte
    return image_of(bytes(data))


def forged(image: FakeImage) -> bytes:
    """Return other bytes with the same checksums of units."""
    data = bytearray(image.data)
    for at in FORGED_AT:
        data[at] ^= 1
    assert unit_checksums(memoryview(data)) == image.manifest.units
    return bytes(data)


def forge(folder: Path, image: FakeImage) -> None:
    """Change a node's copy, as a node that was taken over would."""
    (path,) = folder.glob(f"*/{image.digest}")
    with path.open("r+b") as file:
        file.write(forged(image)[: FORGED_AT[-1] + 1])


async def test_what_arrived_in_the_arena_is_checked_and_dropped_with_its_instance(tmp_path: Path) -> None:
    image, early = forgeable(), FakeEngines(early=True)  # which do not look at the bytes
    async with (
        FakeCluster(tmp_path, settle_s=SETTLE_S) as cluster,
        cluster.node("n0", "h0") as first,
        cluster.node("n1", "h1", engines=early) as second,
    ):
        await cluster.put(image)
        await first.ask(WarmImage(image=image.ref()))
        await counted(first, "images_verified")
        forge(cluster.shm, image)
        holder = await first.holder()
        await second.ask(start_request("i1", image, holder))
        await counted(second, "images_rejected")
        await without_instances(cluster, second)
        assert (await second.record()).holdings == ()
        early.early = False
        await second.ask(start_request("i2", image, holder))  # not from that peer again
        await counted(second, "images_verified")
        record = await second.record()
        assert record.counters["disk_read_bytes"] == len(image.data)
        assert [holding.tiers for holding in record.holdings] == [(Tier.GPU,)]


@asynccontextmanager
async def two_nodes(folder: Path, image: FakeImage) -> AsyncIterator[tuple[FakeCluster, FakeNode, FakeNode]]:
    """Two nodes which check images soon, and a store which has the image."""
    async with (
        FakeCluster(folder, settle_s=SETTLE_S) as cluster,
        cluster.node("n0", "h0") as first,
        cluster.node("n1", "h1") as second,
    ):
        await cluster.put(image)
        yield cluster, first, second


async def counted(node: FakeNode, counter: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (await node.record()).counters[counter]:
            pass


async def without_instances(cluster: FakeCluster, node: FakeNode) -> None:
    """Return once the failed ones have left."""
    async with asyncio.timeout(PATIENCE_S):
        while (await cluster.state.snapshot()).instances:
            await node.record()


def damage(folder: Path, image: FakeImage, offset: int) -> None:
    """Change a byte of a node's copy that the checksum of its unit covers."""
    (path,) = folder.glob(f"*/{image.digest}")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([image.data[offset] ^ 1]))


class CheckedTier:
    """The checks of one of a host's nodes."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.checks = ImageChecks(tier, ImageCopies(tier, EmptyArena()), Counters(), settle_s=SETTLE_S)
        self.rejected: list[tuple[str, ImageCopy]] = []

    async def rejects(self) -> None:
        """Run the checks until one rejects an image."""
        done = asyncio.Event()

        async def reject(image: str, copy: ImageCopy) -> None:
            assert isinstance(copy, int)
            self.tier.discard(image, copy)
            self.rejected.append((image, copy))
            done.set()

        running = asyncio.create_task(self.checks.run(lambda: False, reject))
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        await cancel_and_wait(running)


async def test_a_genuine_image_is_verified_once(tmp_path: Path) -> None:
    image = forgeable()
    async with two_nodes(tmp_path, image) as (cluster, first, _):
        await first.ask(WarmImage(image=image.ref()))
        await counted(first, "images_verified")
        await first.ask(WarmImage(image=image.ref()))
        assert (cluster.shm / "h0" / f"{image.digest}.verified").exists()
        assert (await first.record()).counters["images_verified"] == 1


async def test_a_forged_image_is_dropped_and_loaded_from_the_store(tmp_path: Path) -> None:
    image = forgeable()
    async with two_nodes(tmp_path, image) as (cluster, first, second):
        await first.ask(WarmImage(image=image.ref()))
        await counted(first, "images_verified")
        forge(cluster.shm, image)
        holder = await first.holder()
        await second.ask(WarmImage(image=image.ref(holder)))
        copy = cluster.shm / "h1" / image.digest
        assert copy.read_bytes() != image.data  # the checksums of its units are right
        await counted(second, "images_rejected")
        assert not copy.exists() and (await second.record()).holdings == ()
        # It is not taken from that peer again.
        await second.ask(start_request("i1", image, holder, host_copy=True))
        assert copy.read_bytes() == image.data
        await counted(second, "images_verified")
        record = await second.record()
        assert record.counters["disk_read_bytes"] == len(image.data)


async def test_the_store_is_trusted_after_it_completed_what_a_forger_began(tmp_path: Path) -> None:
    image = forgeable()
    async with two_nodes(tmp_path, image) as (cluster, first, second):
        await first.ask(WarmImage(image=image.ref()))
        await counted(first, "images_verified")
        forge(cluster.shm, image)
        damage(cluster.shm, image, len(image.data) - 1)  # the pull fails after the forged unit
        holder = await first.holder()
        await second.ask(WarmImage(image=image.ref(holder)))
        copy = cluster.shm / "h1" / image.digest
        assert copy.read_bytes() != image.data
        counters = (await second.record()).counters
        assert counters["cast_recv_bytes"] and counters["disk_read_bytes"]
        await counted(second, "images_rejected")
        await second.ask(WarmImage(image=image.ref(holder)))
        assert copy.read_bytes() == image.data
        await counted(second, "images_verified")


async def test_instances_of_a_forged_image_fail_and_it_is_served_no_more(tmp_path: Path) -> None:
    image = forgeable()
    async with (
        FakeCluster(tmp_path, settle_s=SETTLE_S) as cluster,
        cluster.node("n0", "h0") as first,
        cluster.node("n1", "h1", engines=FakeEngines(early=True)) as second,
        cluster.node("n2", "h2") as third,
    ):
        await cluster.put(image)
        await first.ask(WarmImage(image=image.ref()))
        await counted(first, "images_verified")
        forge(cluster.shm, image)
        await second.ask(start_request("i1", image, await first.holder()))
        holder = await second.holder()
        await counted(second, "images_rejected")
        await without_instances(cluster, second)
        with pytest.raises(RemoteError, match=r"failed, not ready|no instance"):
            await second.ask(generate("i1"))
        blob = cluster.blob(image)
        blob.unlink()
        with pytest.raises(RemoteError, match="cannot be loaded"):
            await third.ask(WarmImage(image=image.ref(holder)))
        assert (await second.record()).holdings == ()


async def test_all_nodes_of_a_host_drop_a_forged_image(tmp_path: Path) -> None:
    image = forgeable()
    async with (
        FakeCluster(tmp_path, settle_s=SETTLE_S) as cluster,
        cluster.node("n0", "h0") as first,
        cluster.node("n1", "h1") as second,
        cluster.node("n2", "h1", engines=FakeEngines(early=True)) as third,
    ):
        await cluster.put(image)
        await first.ask(WarmImage(image=image.ref()))
        await counted(first, "images_verified")
        forge(cluster.shm, image)
        holder = await first.holder()
        await second.ask(WarmImage(image=image.ref(holder)))
        await third.ask(start_request("i1", image, holder))  # what the other has loaded
        assert (await third.record()).counters["cast_recv_bytes"] == 0
        await counted(second, "images_rejected")
        await counted(third, "images_rejected")
        await without_instances(cluster, third)
        with pytest.raises(RemoteError, match=r"failed, not ready|no instance"):
            await third.ask(generate("i1"))
        for node in (second, third):
            await node.ask(WarmImage(image=image.ref(holder)))
        assert (cluster.shm / "h1" / image.digest).read_bytes() == image.data


@pytest.mark.parametrize("is_reloaded", [False, True])
async def test_what_one_node_of_a_host_rejected_others_reject(open_tier: OpenTier, is_reloaded: bool) -> None:
    tiers, name = (open_tier(1 << 20), open_tier(1 << 20)), digest("a")
    fill(tiers[0], "b", 5000).close()
    (tiers[0].directory / digest("b")).rename(tiers[0].directory / name)  # another's bytes
    nodes = [CheckedTier(tier) for tier in tiers]
    forged, used = tiers[0].open(name), tiers[1].open(name)
    assert forged is not None and used is not None
    for node in nodes:
        node.checks.add(name, used.inode)
    await nodes[0].rejects()
    if is_reloaded:
        fill(tiers[0], "a", 5000).close()
    reloaded = [image.digest for image in tiers[0].images()]
    await nodes[1].rejects()
    assert [node.rejected for node in nodes] == [[(name, used.inode)]] * 2
    assert [image.digest for image in tiers[0].images()] == reloaded == [name] * is_reloaded
    assert not (tiers[0].directory / f"{name}.verified").exists()
    forged.close()
    used.close()


async def test_an_evicted_image_is_not_rejected_nor_one_that_reuses_an_inode(open_tier: OpenTier) -> None:
    tier = open_tier(1 << 20)
    evicted = fill(tier, "a", 5000)
    evicted.close()
    assert tier.evict(digest("a")) and not tier.is_rejected(digest("a"), evicted.inode)
    writer = begin(tier, "a", 5000)
    inode = writer.path.stat().st_ino
    tier.discard(digest("a"), inode)  # an earlier file with this number
    assert tier.is_rejected(digest("a"), inode)
    with closing(writer.publish()) as mapping:
        assert mapping.inode == inode and tier.holds(digest("a"))
        assert not tier.is_rejected(digest("a"), inode)


async def test_a_damaged_store_is_found_by_the_whole_image(tmp_path: Path) -> None:
    image = forgeable()
    async with two_nodes(tmp_path, image) as (cluster, first, _):
        blob = cluster.blob(image)
        blob.chmod(0o600)
        blob.write_bytes(forged(image))
        await first.ask(WarmImage(image=image.ref()))
        await counted(first, "images_rejected")
        with pytest.raises(RemoteError, match="cannot be loaded"):
            await first.ask(WarmImage(image=image.ref()))
