"""Reads of blobs around the page cache: the same bytes, whatever is cached, aligned or supported."""

import asyncio
import hashlib
import mmap
import os
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.load.weights import drop_from_cache, read_into_cache
from registry.images.local_reader import DIRECT_BYTES, DIRECT_READS, LocalReader
from registry.images.local_store import LocalStore
from registry.images.page_cache import PageCacheMap
from tests.fixtures.patience import PATIENCE_S

CONTENT = os.urandom(4 * DIRECT_BYTES + 12345)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    async def chunks() -> AsyncIterator[bytes]:
        yield CONTENT

    store = LocalStore(tmp_path)
    asyncio.run(store.append(DIGEST, 0, chunks(), total=len(CONTENT)))
    return store


@pytest.mark.parametrize("cached", ["nothing", "a part", "all"])
@pytest.mark.parametrize("start", [0, 1, 4096, DIRECT_BYTES])
@pytest.mark.parametrize("shift", [0, 8])
def test_reads_give_the_bytes_of_the_blob(
    store: LocalStore, tmp_path: Path, cached: str, start: int, shift: int
) -> None:
    blob = tmp_path / "blobs" / DIGEST
    if cached == "all":
        read_into_cache(blob)
    else:
        drop_from_cache(blob)
    if cached == "a part":
        with blob.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(file.fileno(), 8192, 2 * DIRECT_BYTES)
    with mmap.mmap(-1, len(CONTENT) + mmap.PAGESIZE) as memory, memoryview(memory) as whole:
        reader = store.open_blob(DIGEST)
        with whole[shift : shift + len(CONTENT) - start] as view:
            reader.read_into(start, view)
            assert view == CONTENT[start:]
        reader.close()
        reader.close()


def test_large_reads_leave_nothing_in_the_page_cache(store: LocalStore, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / DIGEST
    drop_from_cache(blob)
    with blob.open("rb") as file:
        cached = PageCacheMap(file.fileno())
        if cached.cached_share(0, DIRECT_BYTES):
            pytest.skip("this file system keeps its files in memory")
        reader = store.open_blob(DIGEST)
        with mmap.mmap(-1, 4 * DIRECT_BYTES) as memory, memoryview(memory) as view:
            reader.read_into(0, view)
            assert view == CONTENT[: len(view)]
        assert cached.cached_share(0, 4 * DIRECT_BYTES) == 0
        assert reader.cached(0, 4 * DIRECT_BYTES) is None
        read_into_cache(blob)
        assert reader.cached(0, 4 * DIRECT_BYTES) is not None
        reader.close()
        assert cached.cached_share(0, 4 * DIRECT_BYTES) == cached.cached_share(5, 4096) == 1
        os.truncate(blob, DIRECT_BYTES)
        assert cached.cached_share(2 * DIRECT_BYTES, DIRECT_BYTES) == 0
        cached.close()


class MeetingReads:
    """os.preadv, which lets reads wait until DIRECT_READS are under way, and counts how many are at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all_there = threading.Barrier(DIRECT_READS)
        self._under_way = 0
        self.most = 0

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        self._all_there.wait(PATIENCE_S)
        count = os.preadv(descriptor, buffers, offset)
        with self._lock:
            self._under_way -= 1
        return count


def test_a_disk_has_a_bounded_number_of_large_reads(store: LocalStore, tmp_path: Path) -> None:
    blob, reads, parts = tmp_path / "blobs" / DIGEST, MeetingReads(), 2 * DIRECT_READS
    drop_from_cache(blob)
    with (
        closing(LocalReader(blob, reads)) as reader,
        mmap.mmap(-1, parts * DIRECT_BYTES) as memory,
        memoryview(memory) as whole,
        ThreadPoolExecutor(parts) as pool,
    ):
        if not reader.is_direct or reader.cached(0, DIRECT_BYTES) is not None:
            pytest.skip("this file system has no direct reads")

        def read(offset: int) -> None:
            with whole[offset : offset + DIRECT_BYTES] as view:
                reader.read_into(offset, view)

        list(pool.map(read, range(0, parts * DIRECT_BYTES, DIRECT_BYTES)))
        assert whole == CONTENT[: len(whole)]
    assert reads.most == DIRECT_READS
