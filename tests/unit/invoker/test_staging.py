"""Memory in huge pages and not: what a disk reads comes to its place by itself, or by way of a buffer."""

import ctypes
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.load.weights import drop_from_cache
from invoker.base.counters import Counters
from invoker.base.errors import HostTierFull
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.staging import Staging
from invoker.host_tier.tier import HostTier
from invoker.loading.partial_image import CHUNK_BYTES
from invoker.memory.huge_pages import HUGE_PAGE, populate_huge_pages
from registry.errors import CorruptImage
from registry.images.local_store import LocalStore
from registry.images.manifest import UNIT_BYTES
from tests.fixtures.invoker import make_image
from tests.fixtures.mount import file_system
from tests.fixtures.stored_image import damage, read_whole, stored

PR_SET_THP_DISABLE = 41


@pytest.fixture(params=[False, True], ids=["small", "huge"])
def huge(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether this process can have huge pages."""
    libc = ctypes.CDLL(None)
    if not request.param:
        assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(HUGE_PAGE)
            if populate_huge_pages(file.fileno(), 0, HUGE_PAGE) != request.param:
                pytest.skip(f"this kernel gives no {'huge' if request.param else 'small'} pages here")
        yield request.param
    finally:
        assert libc.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"tier-test-{os.getpid()}-{random.getrandbits(32):08x}"
    yield folder
    assert not folder.exists()


def test_memory_is_taken_in_huge_pages_and_keeps_what_is_there(memory: Path, huge: bool) -> None:
    tier = HostTier(memory / "h0", 64 << 20)
    writer = tier.begin("a" * 64, 3 * HUGE_PAGE + 5)
    assert isinstance(writer, ImageWriter)
    writer.view[HUGE_PAGE + 7] = 7
    assert writer.populate_huge(0, 5) == huge
    writer.prepare(0, writer.nbytes)
    assert writer.view[HUGE_PAGE + 7] == 7 and bytes(writer.view).count(0) == writer.nbytes - 1
    writer.abandon()
    tier.close()


def test_memory_that_cannot_be_had_is_refused(tmp_path: Path, huge: bool) -> None:
    with file_system(tmp_path / "small", "size=8m") as folder:
        tier = HostTier(folder / "h0", 64 << 20)
        writer = tier.begin("a" * 64, 32 << 20)
        assert isinstance(writer, ImageWriter)
        with pytest.raises(HostTierFull, match="is full"):
            writer.prepare(0, 32 << 20)
        writer.abandon()
        tier.close()


async def test_the_disk_is_read_whole_and_checked(memory: Path, huge: bool, tmp_path: Path) -> None:
    image = make_image("a", 2 * CHUNK_BYTES + UNIT_BYTES + 5)
    blob = tmp_path / "blobs" / image.digest

    async def load(store: LocalStore, tier: HostTier) -> None:
        drop_from_cache(blob)
        writer = tier.begin(image.digest, len(image.data))
        assert isinstance(writer, ImageWriter)
        assert writer.populate_huge(0, 1) == huge
        await read_whole(store, image, writer, Counters())

    store = await stored(tmp_path, image)
    tier = HostTier(memory / "h0", 64 << 20)
    await load(store, tier)
    damage(blob, 33)
    with pytest.raises(CorruptImage, match=r"in the store: units 33$"):
        await load(store, tier)
    tier.close()


def test_a_buffer_is_lent_to_one_at_a_time() -> None:
    with closing(Staging(1, UNIT_BYTES)) as staging:
        has_it, done = threading.Event(), threading.Event()
        seen: list[bytes] = []

        def borrow() -> None:
            with staging.borrow() as buffer:
                buffer[:1] = b"x"
                has_it.set()
                done.wait()
                seen.append(bytes(buffer[:1]))

        thread = threading.Thread(target=borrow)
        thread.start()
        has_it.wait()
        done.set()
        with staging.borrow() as buffer:
            buffer[:1] = b"y"
        thread.join()
        assert seen == [b"x"]
