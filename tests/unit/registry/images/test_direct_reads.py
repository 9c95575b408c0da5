"""Reads of blobs around the page cache: the same bytes, whatever is cached, aligned or supported."""

import asyncio
import hashlib
import mmap
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.load.weights import drop_from_cache, read_into_cache
from registry.images.local_reader import DIRECT_BYTES, DIRECT_READS
from registry.images.local_store import LocalStore
from registry.images.page_cache import PageCacheMap

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


def test_a_disk_has_a_bounded_number_of_large_reads(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_from_cache(tmp_path / "blobs" / DIGEST)
    reader, read = store.open_blob(DIGEST), os.preadv
    if not reader.is_direct or reader.cached(0, DIRECT_BYTES) is not None:
        pytest.skip("this file system has no direct reads")
    lock, full = threading.Lock(), threading.Barrier(DIRECT_READS)
    under_way = most = 0

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        full.wait(10)  # so many are under way together
        count = read(descriptor, buffers, offset)
        with lock:
            under_way -= 1
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    parts = 2 * DIRECT_READS
    with mmap.mmap(-1, parts * DIRECT_BYTES) as memory, memoryview(memory) as whole:
        views = [whole[at * DIRECT_BYTES : (at + 1) * DIRECT_BYTES] for at in range(parts)]
        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(reader.read_into, range(0, parts * DIRECT_BYTES, DIRECT_BYTES), views))
        assert whole == CONTENT[: len(whole)]
        for view in views:
            view.release()
    reader.close()
    assert most == DIRECT_READS
