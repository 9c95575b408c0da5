"""Memory kept ready for the next image: what it saves, whom it gives way to, who never sees old bytes."""

import asyncio
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.load.weights import drop_from_cache, read_into_cache
from invoker.base.counters import Counters
from invoker.host_tier.buffer_pool import LARGEST_SHARE, MIN_BYTES, SpareBuffer
from invoker.host_tier.folder import TierFolder, is_open_elsewhere
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
from registry.errors import CorruptImage
from registry.images.local_store import LocalStore
from tests.fixtures.host_tier import begin, digest, fill
from tests.fixtures.invoker import make_image
from tests.fixtures.mount import file_system
from tests.fixtures.stored_image import damage, read_whole, stored

OpenTier = Callable[..., HostTier]
MIB = 1 << 20
SPARE = 2 * MIN_BYTES


def spares(folder: Path) -> list[Path]:
    return list(folder.glob("*.spare"))


def total(folder: Path) -> int:
    """Bytes of all images and spares."""
    return sum(path.stat().st_size for path in folder.iterdir())


def faults_of(write: ImageWriter, nbytes: int) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    write.prepare(0, nbytes)
    with memoryview(write.view) as view:
        for offset in range(0, nbytes, mmap.PAGESIZE):
            view[offset] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_a_load_takes_the_spare_and_the_next_one_is_made(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(8 * SPARE, spare_bytes=SPARE)
    assert tier.wait_for_spare() == SPARE and len(spares(folder)) == 1
    assert tier.used_bytes() == 0 and total(folder) == SPARE
    writer = begin(tier, "a", SPARE - 5000)
    assert not spares(folder), "while something loads, no processor time goes to the next"
    assert writer.is_ready(0, SPARE - 5000) and bytes(writer.view[:8]) == bytes(8)
    assert faults_of(writer, SPARE - 5000) < SPARE // mmap.PAGESIZE // 10
    writer.view[:] = b"a" * (SPARE - 5000)
    with closing(writer.publish()) as mapping:
        assert mapping.view == b"a" * (SPARE - 5000)
        assert tier.used_bytes() == SPARE - 5000 == (folder / digest("a")).stat().st_size
        assert tier.wait_for_spare() == SPARE - 4096 and len(spares(folder)) == 1


def test_an_image_larger_than_the_spare_grows_it(open_tier: OpenTier) -> None:
    tier = open_tier(8 * SPARE, spare_bytes=SPARE)
    tier.wait_for_spare()
    writer = begin(tier, "a", SPARE + MIB)
    assert writer.is_ready(0, SPARE) and not writer.is_ready(SPARE, 1)
    writer.prepare(SPARE, MIB)
    writer.view[:] = b"a" * (SPARE + MIB)
    with closing(writer.publish()) as mapping:
        assert len(mapping.view) == SPARE + MIB and mapping.view[-1] == ord("a")


def test_a_small_image_leaves_the_spare(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(8 * SPARE, spare_bytes=SPARE)
    tier.wait_for_spare()
    before = spares(folder)
    small = SPARE // LARGEST_SHARE - 1
    writer = begin(tier, "a", small)
    assert not writer.is_ready(0, small)
    writer.abandon()
    assert spares(folder) == before and tier.wait_for_spare() == SPARE


def test_the_next_spare_is_as_large_as_the_largest_of_the_last_images(
    folder: Path, open_tier: OpenTier
) -> None:
    tier = open_tier(16 * SPARE, spare_bytes=SPARE)
    for name, nbytes, made in (
        ("a", SPARE // 2, SPARE // 2),
        ("b", SPARE // 2 + 1, SPARE // 2 + mmap.PAGESIZE),
        ("c", 2 * SPARE, SPARE),
        ("d", SPARE // 2, SPARE),
        ("e", SPARE // 2, SPARE),
        ("f", SPARE // 2, SPARE),
        ("g", SPARE // 2, SPARE // 2),
    ):
        tier.wait_for_spare()
        fill(tier, name, nbytes).close()
        assert tier.wait_for_spare() == made, name
        assert (folder / digest(name)).stat().st_size == nbytes
        tier.evict(digest(name))


def test_without_a_setting_or_room_there_is_none(folder: Path) -> None:
    for limit, spare in ((8 * SPARE, 0), (8 * SPARE, MIN_BYTES - 1), (MIN_BYTES - 1, SPARE)):
        tier = HostTier(folder, limit, spare_bytes=spare)
        assert tier.wait_for_spare() == 0 and not spares(folder)
        tier.close()


def test_a_spare_gives_way_to_images_of_any_process_and_evicts_none(
    folder: Path, open_tier: OpenTier
) -> None:
    limit = 2 * SPARE
    tier, other = open_tier(limit, spare_bytes=SPARE), open_tier(limit)
    tier.wait_for_spare()
    fill(other, "a", SPARE).close()
    assert len(spares(folder)) == 1 and total(folder) == limit
    fill(other, "b", MIB).close()
    assert not spares(folder) and tier.wait_for_spare() == 0
    assert [one.digest for one in other.images()] == [digest("a"), digest("b")] and other.evictions == 0
    fill(tier, "c", SPARE - MIB).close()
    assert total(folder) == limit and not spares(folder)
    assert tier.evict(digest("a"))
    assert tier.wait_for_spare() == SPARE - MIB and total(folder) == limit - MIB
    fill(tier, "a", SPARE).close()
    assert tier.evictions == other.evictions == 0, "the room was the spare's own"


def test_a_spare_that_is_not_whole_yet_serves_as_far_as_it_is(open_tier: OpenTier) -> None:
    tier = open_tier(64 * SPARE, spare_bytes=8 * SPARE)
    writer = begin(tier, "a", 8 * SPARE)
    writer.prepare(0, 8 * SPARE)
    writer.view[-1:] = b"a"
    with closing(writer.publish()) as mapping:
        assert mapping.view[-1] == ord("a")


MAKER = """
import sys
from pathlib import Path
from invoker.host_tier.tier import HostTier
tier = HostTier(Path(sys.argv[1]), 1 << 30, spare_bytes=2 << 20)
print(tier.wait_for_spare(), flush=True)
sys.stdin.readline()
"""


def test_the_spare_of_a_killed_process_goes_when_the_next_one_starts(
    folder: Path, open_tier: OpenTier
) -> None:
    open_tier(1 << 30)  # which keeps the folder
    command = [sys.executable, "-c", MAKER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == f"{2 << 20}\n"
        HostTier(folder, 1 << 30).close()
        assert len(spares(folder)) == 1
        maker.kill()
        maker.wait()
    assert len(spares(folder)) == 1
    HostTier(folder, 1 << 30).close()
    assert not spares(folder)


def test_the_memory_of_an_evicted_image_serves_the_next(folder: Path, open_tier: OpenTier) -> None:
    tier = open_tier(3 * MIB)
    fill(tier, "a", 2 * MIB).close()
    inode = (folder / digest("a")).stat().st_ino
    writer = begin(tier, "b", 2 * MIB - 1)
    assert writer.path.stat().st_ino == inode and writer.path.stat().st_blocks * 512 >= 2 * MIB - 1
    assert not tier.holds(digest("a")) and tier.evictions == 1
    writer.view[:] = b"b" * (2 * MIB - 1)
    with closing(writer.publish()) as mapping:
        assert mapping.view == b"b" * (2 * MIB - 1)
    writer = begin(tier, "c", 3 * MIB)
    writer.abandon()
    assert total(folder) == 0


@pytest.mark.parametrize("how", ["a view", "a descriptor", "a mapping alone"])
def test_memory_that_anybody_can_still_see_is_not_used_again(
    folder: Path, open_tier: OpenTier, how: str
) -> None:
    tier = open_tier(3 * MIB)
    mapping = fill(tier, "a", 2 * MIB)
    view = mapping.view[:]
    mapping.close()
    if how != "a view":
        view.release()
        file = os.open(folder / digest("a"), os.O_RDONLY)
        if how == "a mapping alone":
            view = memoryview(mmap.mmap(file, 2 * MIB, prot=mmap.PROT_READ))
            os.close(file)
    inode = (folder / digest("a")).stat().st_ino
    writer = begin(tier, "b", 2 * MIB)
    assert writer.path.stat().st_ino != inode
    writer.view[:] = b"b" * (2 * MIB)
    writer.publish().close()
    if how == "a descriptor":
        assert os.pread(file, 100, 0) == b"a" * 100
        os.close(file)
    else:
        assert view == b"a" * (2 * MIB)
        view.release()


def test_a_lease_tells_who_else_has_a_file_open(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"tier-test-{os.getpid()}-lease"
    path.write_bytes(b"x" * 8192)
    mine = os.open(path, os.O_RDWR)
    try:
        assert not is_open_elsewhere(mine)
        for flags in (os.O_RDONLY, os.O_RDWR):
            other = os.open(path, flags)
            assert is_open_elsewhere(mine)
            os.close(other)
            assert not is_open_elsewhere(mine)
    finally:
        os.close(mine)
        path.unlink()


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """Yield a tmpfs with room for one spare buffer and little more."""
    with file_system(tmp_path / "small", f"size={4 * MIN_BYTES}") as folder:
        yield folder


@pytest.mark.parametrize("how", ["prepare", "receive", "write"])
def test_a_spare_gives_way_where_the_file_system_is_full(small_memory: Path, how: str) -> None:
    nbytes = 4 * MIN_BYTES - MIB // 2
    tier = HostTier(small_memory / "h0", 1 << 30, spare_bytes=1 << 30)
    other = HostTier(small_memory / "h0", 1 << 30)
    assert tier.wait_for_spare() == MIN_BYTES, "no more than a quarter of what is free"
    writer = begin(other, "a", nbytes)
    assert len(spares(small_memory / "h0")) == 1
    if how == "prepare":
        writer.prepare(0, nbytes)
        writer.view[:] = b"a" * nbytes
    elif how == "write":
        writer.write(0, memoryview(b"a" * nbytes))
    else:
        source = small_memory.parent / "source"
        source.write_bytes(b"a" * nbytes)
        with source.open("rb") as file:
            assert writer.receive(0, nbytes, file.fileno())
    assert not spares(small_memory / "h0") and writer.view == b"a" * nbytes
    writer.publish().close()
    other.close()
    tier.close()


@pytest.mark.parametrize("cached", [False, True])
def test_the_store_is_read_into_the_spare_and_checked(folder: Path, tmp_path: Path, cached: bool) -> None:
    image = make_image("a", MIN_BYTES + 5)
    blob = tmp_path / "blobs" / image.digest
    counters = Counters()

    async def load(store: LocalStore, tier: HostTier) -> None:
        tier.wait_for_spare()
        (read_into_cache if cached else drop_from_cache)(blob)
        writer = begin(tier, "a", len(image.data))
        assert writer.is_ready(0, len(image.data))
        await read_whole(store, image, writer, counters)

    async def scenario() -> None:
        store = await stored(tmp_path, image)
        tier = HostTier(folder, 8 * MIN_BYTES, spare_bytes=2 * MIN_BYTES)
        await load(store, tier)
        assert counters.disk_read_bytes == len(image.data)
        damage(blob, 3)
        with pytest.raises(CorruptImage, match=r"in the store: units 3$"):
            await load(store, tier)
        tier.close()

    asyncio.run(scenario())
    assert not folder.parent.exists()


def test_a_spare_that_cannot_become_an_image_is_given_back(folder: Path) -> None:
    own = TierFolder(folder)
    spare = SpareBuffer(own, SPARE)
    spare.wait()
    assert spare.take(folder / "nowhere" / "a.part", SPARE) is None
    assert not spare.exists and not spares(folder)
    own.leave()
