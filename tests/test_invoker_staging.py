"""What a disk reads comes to its place: where pages are small through a buffer, else by itself."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.load_weights import forget
from invoker.counters import Counters
from invoker.fetch import CHUNK_BYTES, READS_IN_FLIGHT, Target, from_store
from invoker.filling import Filling
from invoker.host_tier import HostTier
from invoker.staging import Staging
from registry.errors import CorruptImage
from registry.images.local_store import LocalStore
from registry.images.manifest import UNIT_BYTES
from tests.invoker_fixture import make_image
from tests.mount_fixture import file_system

PAGES = {"small": "never", "huge": "advise"}


@pytest.fixture(params=PAGES)
def pages(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def memory(pages: str, tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with pages of that kind."""
    with file_system(tmp_path / "memory", "size=256m", f"huge={PAGES[pages]}") as folder:
        yield folder


def test_the_disk_is_read_whole_and_checked(memory: Path, pages: str, tmp_path: Path) -> None:
    image = make_image("a", (READS_IN_FLIGHT + 1) * CHUNK_BYTES + UNIT_BYTES + 5)
    blob = tmp_path / "blobs" / image.digest

    async def pieces() -> AsyncIterator[bytes]:
        yield image.data

    async def load(store: LocalStore, tier: HostTier) -> None:
        forget(blob)
        filling = tier.begin(image.digest, len(image.data))
        assert isinstance(filling, Filling) and filling.is_scattered == (pages == "small")
        target = Target(filling, image.manifest, lambda arrived: None)
        try:
            await from_store(store, target, Counters(), local=True)
            assert target.is_complete and filling.view == image.data
        finally:
            target.release()

    async def scenario() -> None:
        store = LocalStore(tmp_path)
        await store.append(image.digest, 0, pieces(), total=len(image.data))
        tier = HostTier(memory / "h0", 64 << 20)
        await load(store, tier)
        with blob.open("r+b") as file:
            file.seek(33 * UNIT_BYTES + 7)
            file.write(b"not it")
        with pytest.raises(CorruptImage, match=r"in the store: units 33$"):
            await load(store, tier)
        tier.close()

    asyncio.run(scenario())


def test_a_buffer_is_lent_to_one_at_a_time() -> None:
    with closing(Staging(1, UNIT_BYTES)) as staging:
        has_it, done = threading.Event(), threading.Event()
        seen: list[bytes] = []

        def borrow() -> None:
            with staging.lent() as buffer:
                buffer[:1] = b"x"
                has_it.set()
                done.wait()
                seen.append(bytes(buffer[:1]))

        thread = threading.Thread(target=borrow)
        thread.start()
        has_it.wait()
        done.set()
        with staging.lent() as buffer:
            buffer[:1] = b"y"
        thread.join()
        assert seen == [b"x"]
