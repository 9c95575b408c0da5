"""The disk tier of a host."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.no_server import EmptyArena
from invoker.base.counters import Counters
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
from invoker.loading.arrival import HostLoad, ImageLoad
from invoker.loading.disk_cache import STEP_BYTES, DiskCache, DiskSpace
from invoker.loading.disk_writer import DiskWriter
from invoker.loading.fetch_order import DISK_CACHE, FetchOrder, LoadSources
from invoker.loading.image_copies import ImageCopies
from invoker.loading.origins import Origins
from invoker.loading.partial_image import PartialImage
from invoker.loading.starts_first import StartsFirst
from rdmacast.aio.groups import cancel_and_discard
from registry.errors import NotFound
from registry.images.manifest import UNIT_BYTES
from registry.messages.images import ImageRef
from tests.fixtures.invoker import FakeImage, empty_disk, make_image

MIB = 1 << 20


def cache(tmp_path: Path, limit_bytes: int = 64 * MIB, link_bytes_s: float = 1e9) -> DiskCache:
    return DiskCache(tmp_path / "disk", limit_bytes, link_bytes_s, space=empty_disk)


def write(disk: DiskCache, source: Path, digest: str) -> bool:
    """Write a file as an image; return whether it was taken."""
    started = disk.begin(digest, source.stat().st_size)
    if started is None:
        return False
    buffer = memoryview(bytearray(STEP_BYTES))
    with source.open("rb") as file:
        while not started.is_complete:
            started.step(lambda offset, into: os.preadv(file.fileno(), [into], offset), buffer)
    started.finish()
    return True


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(20 * MIB))
    return path


def digest(letter: str) -> str:
    return letter * 64


def files(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "disk").iterdir()]


def names(disk: DiskCache) -> list[str]:
    return [image.digest[0] for image in disk.images()]


def test_an_image_is_written_once_and_read_back(tmp_path: Path, source: Path) -> None:
    disk = cache(tmp_path)
    assert write(disk, source, digest("a")) and not write(disk, source, digest("a"))
    assert [(image.digest, image.nbytes) for image in disk.images()] == [(digest("a"), 20 * MIB)]
    reader = disk.open_blob(digest("a"))
    into = bytearray(1000)
    reader.read_into(5 * MIB, memoryview(into))
    assert into == source.read_bytes()[5 * MIB : 5 * MIB + 1000]
    reader.close()
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "disk" / digest("a")).stat().st_mode & 0o777 == 0o600
    with pytest.raises(NotFound):
        disk.open_blob(digest("b"))


def test_the_least_recently_used_makes_room(tmp_path: Path, source: Path) -> None:
    disk = cache(tmp_path, 50 * MIB)
    for order, letter in enumerate("ab"):
        write(disk, source, digest(letter))
        os.utime(tmp_path / "disk" / digest(letter), (100 + order, 100 + order))
    disk.open_blob(digest("a")).close()  # now b is the oldest
    assert write(disk, source, digest("c")) and sorted(names(disk)) == ["a", "c"]
    small = cache(tmp_path / "small", 10 * MIB)
    assert not write(small, source, digest("a")) and names(small) == []


@pytest.mark.parametrize(("free", "fits"), [(24 * MIB, False), (26 * MIB, True)])
def test_what_other_files_need_of_the_disk_is_left_free(
    tmp_path: Path, source: Path, free: int, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskCache(
        tmp_path / "disk", 64 * MIB, 1e9, space=lambda path: DiskSpace(total=100 * MIB, free=free)
    )
    assert write(disk, source, digest("a")) is fits
    assert ("does not fit into the disk tier" in caplog.text) is not fits


def test_an_unfinished_write_leaves_nothing(tmp_path: Path, source: Path) -> None:
    disk = cache(tmp_path)
    started = disk.begin(digest("a"), 20 * MIB)
    assert started is not None and disk.begin(digest("a"), 20 * MIB) is None  # one writer
    started.abandon()
    assert files(tmp_path) == ["lock"]
    (tmp_path / "disk" / f"{digest('b')}.part").write_bytes(b"of a killed process")
    cache(tmp_path)
    assert files(tmp_path) == ["lock"]


def test_an_image_is_dropped(tmp_path: Path, source: Path) -> None:
    disk = cache(tmp_path)
    write(disk, source, digest("a"))
    assert disk.drop(digest("a")) and not disk.drop(digest("a")) and names(disk) == []


def test_the_disk_goes_first_if_it_is_faster_than_a_link(tmp_path: Path) -> None:
    assert cache(tmp_path, link_bytes_s=1.25e9).goes_first  # 10 Gbit/s
    assert not cache(tmp_path, link_bytes_s=50e9).goes_first  # 400 Gbit/s
    slow = cache(tmp_path, link_bytes_s=1.25e9)
    slow.measured(1000, 1.0)  # too little to say anything
    assert slow.goes_first
    for _ in range(10):
        slow.measured(100 * MIB, 1.0)
    assert not slow.goes_first


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostTier]:
    made = HostTier(tmp_path / "host", 64 * MIB)
    yield made
    made.close()


def in_memory(tier: HostTier, image: FakeImage) -> int:
    """Put an image into the host tier; return its inode."""
    writer = tier.begin(image.digest, len(image.data))
    assert isinstance(writer, ImageWriter)
    writer.prepare(0, len(image.data))
    writer.view[:] = image.data
    mapping = writer.publish()
    inode = mapping.inode
    mapping.close()
    return inode


async def test_verified_images_are_written_in_the_background(tmp_path: Path, tier: HostTier) -> None:
    image, disk, changed = make_image("a", 9 * MIB), cache(tmp_path), asyncio.Event()
    writer = DiskWriter(disk, ImageCopies(tier, EmptyArena()), changed.set)
    writing = asyncio.create_task(writer.run(lambda: False))
    writer.add("0" * 64, 17)  # evicted meanwhile
    writer.add(image.digest, in_memory(tier, image))
    while writer.is_pending(image.digest):
        await changed.wait()
        changed.clear()
    await cancel_and_discard(writing)
    assert (tmp_path / "disk" / image.digest).read_bytes() == image.data


async def test_background_work_waits_for_starts_up_to_a_limit() -> None:
    busy = [True, True, False, False, True, False, False, False]
    starts = StartsFirst(lambda: busy.pop(0), limit_s=10.0, step_s=0.001)
    await starts.wait()
    assert len(busy) == 5
    await starts.wait(quiet_s=0.002)
    assert not busy
    always_busy = StartsFirst(lambda: True, limit_s=0.005, step_s=0.001)
    await always_busy.wait()
    await always_busy.wait()


async def test_a_write_that_is_cancelled_leaves_nothing(tmp_path: Path, tier: HostTier) -> None:
    image, disk = make_image("a", 9 * MIB), cache(tmp_path)
    asked = asyncio.Event()

    def is_busy() -> bool:
        asked.set()
        return True

    writer = DiskWriter(disk, ImageCopies(tier, EmptyArena()), lambda: None)
    writing = asyncio.create_task(writer.run(is_busy))
    writer.add(image.digest, in_memory(tier, image))
    await asked.wait()
    assert files(tmp_path) != ["lock"]
    await cancel_and_discard(writing)
    assert files(tmp_path) == ["lock"]


def order(disk: DiskCache | None) -> tuple[FetchOrder, Counters]:
    counters = Counters()
    sources = LoadSources(
        node="n", host="h", store=None, casts=None, arena_reader=lambda image: None, disk=disk
    )
    return FetchOrder(sources, Origins(), counters), counters


async def load(tier: HostTier, image: FakeImage, fetches: FetchOrder) -> ImageLoad:
    writer = tier.begin(image.digest, len(image.data))
    assert isinstance(writer, ImageWriter)
    target = PartialImage(writer, image.manifest, lambda arrived: None)
    loading = HostLoad([], "", target, writer)
    ref = ImageRef(image=image.digest, manifest="", nbytes=len(image.data))
    try:
        await fetches.fill(loading, ref)
        assert writer.view == image.data
    finally:
        target.release()
        writer.abandon()
    return loading


async def test_an_image_comes_back_from_the_disk(tmp_path: Path, tier: HostTier) -> None:
    image, disk = make_image("a", 9 * MIB), cache(tmp_path)
    (source := tmp_path / "bytes").write_bytes(image.data)
    write(disk, source, image.digest)
    fetches, counters = order(disk)
    loading = await load(tier, image, fetches)
    assert loading.source == DISK_CACHE and counters.disk_cache_read_bytes == len(image.data)
    assert counters.disk_read_bytes == counters.store_read_bytes == 0


async def test_an_image_that_is_damaged_on_the_disk_is_removed(tmp_path: Path, tier: HostTier) -> None:
    image, disk = make_image("a", 4 * UNIT_BYTES), cache(tmp_path)
    (source := tmp_path / "bytes").write_bytes(bytes(len(image.data)))
    write(disk, source, image.digest)
    fetches, _ = order(disk)
    with pytest.raises(Exception, match=r"disk-cache: image .* is damaged"):
        await load(tier, image, fetches)
    assert not disk.holds(image.digest)
