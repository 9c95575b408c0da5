"""The blob store, local and behind fsspec: uploads that resume, digests that are checked."""

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.errors import (
    CheckpointError,
    Conflict,
    CorruptImage,
    InvalidRecord,
    NotFound,
    StoreError,
    StoreFull,
)
from registry.images.fsspec_store import FsspecStore
from registry.images.local_store import LocalStore
from registry.images.source import Checkpoint, checkpoint_from
from registry.images.store import BlobStore, open_store

CONTENT = bytes(range(256)) * 12_000  # 3 MB: several batches
DIGEST = hashlib.sha256(CONTENT).hexdigest()
KINDS = ("local", "memory", "fsspec-file")

Opener = Callable[[], BlobStore]


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Open the same store again and again, each time as another process would."""
    match request.param:
        case "local":
            return lambda: open_store(str(tmp_path / "store"))
        case "memory":
            return lambda: open_store(f"memory://{tmp_path.name}")
        case _:
            return lambda: FsspecStore(f"file://{tmp_path}/store")


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def split(content: bytes, size: int = 65536) -> Iterable[bytes]:
    return (content[start : start + size] for start in range(0, len(content), size))


async def upload(store: BlobStore, content: bytes, offset: int = 0) -> int:
    digest = hashlib.sha256(content).hexdigest()
    return await store.append(digest, offset, pieces(*split(content[offset:])), total=len(content))


async def test_a_blob_goes_in_and_comes_out(opener: Opener) -> None:
    store = opener()
    assert await store.size(DIGEST) is None
    assert await store.digests() == []
    assert await upload(store, CONTENT) == len(CONTENT)
    assert await store.size(DIGEST) == len(CONTENT)
    assert await store.digests() == [DIGEST]
    assert await store.partial_size(DIGEST) == 0
    assert await store.read(DIGEST, limit=len(CONTENT)) == CONTENT
    assert await opener().size(DIGEST) == len(CONTENT)
    with pytest.raises(StoreError, match="more than the limit"):
        await store.read(DIGEST, limit=100)
    # Complete already: nothing is taken.
    assert await upload(store, CONTENT) == len(CONTENT)
    await store.delete(DIGEST)
    await store.delete(DIGEST)
    assert await store.digests() == []
    with pytest.raises(NotFound, match=DIGEST):
        await store.read(DIGEST, limit=100)
    with pytest.raises(NotFound, match=DIGEST):
        store.open_blob(DIGEST)


async def test_an_empty_blob(opener: Opener) -> None:
    store = opener()
    assert await upload(store, b"") == 0
    assert await store.size(hashlib.sha256(b"").hexdigest()) == 0


async def test_an_upload_goes_on_where_it_stopped(opener: Opener) -> None:
    store = opener()
    for start, end in ((0, 1_000_000), (1_000_000, 1_000_001), (1_000_001, 2_500_000)):
        chunks = pieces(*split(CONTENT[start:end]))
        assert await store.append(DIGEST, start, chunks, total=len(CONTENT)) == end
        assert await store.partial_size(DIGEST) == end
        assert await store.size(DIGEST) is None
    with pytest.raises(Conflict, match="continues at 2500000 bytes, not at 17"):
        await store.append(DIGEST, 17, pieces(b"x"), total=len(CONTENT))
    # Another process, which has not seen the bytes so far, checks them all the same.
    assert await upload(opener(), CONTENT, 2_500_000) == len(CONTENT)
    assert await store.read(DIGEST, limit=1 << 30) == CONTENT


async def test_what_an_interrupted_client_sent_is_kept(opener: Opener) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield CONTENT[:1_500_000]
        yield CONTENT[1_500_000:1_500_100]
        raise ConnectionResetError

    store = opener()
    with pytest.raises(ConnectionResetError):
        await store.append(DIGEST, 0, broken(), total=len(CONTENT))
    assert await store.partial_size(DIGEST) == 1_500_100
    assert await upload(store, CONTENT, 1_500_100) == len(CONTENT)


async def test_a_cancelled_append_keeps_its_bytes_and_unlocks(opener: Opener) -> None:
    store = opener()
    waiting = asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        yield CONTENT[:2_000_000]
        waiting.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(store.append(DIGEST, 0, stalling(), total=len(CONTENT)))
    await waiting.wait()
    with pytest.raises(Conflict, match="in progress"):
        await store.append(DIGEST, 0, pieces(b"x"), total=len(CONTENT))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await upload(store, CONTENT, 2_000_000) == len(CONTENT)


async def test_cancelling_at_any_moment_leaves_a_store_that_goes_on(tmp_path: Path) -> None:
    for kind, make in enumerate((LocalStore, lambda path: FsspecStore(path.as_uri()))):
        store = make(tmp_path / str(kind))
        for turns in range(1, 12):
            task = asyncio.create_task(upload(store, CONTENT, await store.partial_size(DIGEST)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await upload(store, CONTENT, await store.partial_size(DIGEST))
        assert await store.read(DIGEST, limit=1 << 30) == CONTENT


async def test_unfinished_uploads_are_listed_and_dropped_unless_written(opener: Opener) -> None:
    store = opener()
    assert await store.partials() == {} == await store.last_used()
    assert not await store.drop_partial(DIGEST)
    writing, go = asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        writing.set()
        await go.wait()
        yield CONTENT[1000:2000]

    started = time.time() - 2  # a file's time may be that of the kernel's last tick
    append = asyncio.create_task(store.append(DIGEST, 0, chunks(), total=len(CONTENT)))
    await writing.wait()
    assert not await store.drop_partial(DIGEST)
    go.set()
    assert await append == 2000
    reported = (await store.partials())[DIGEST]
    assert reported is not None and started <= reported <= time.time() + 2
    assert await store.digests() == []
    assert await opener().drop_partial(DIGEST)
    assert await store.partials() == {} and await store.partial_size(DIGEST) == 0
    assert await upload(store, CONTENT) == len(CONTENT)  # from the start
    assert list(await store.last_used()) == [DIGEST] and await store.partials() == {}
    await store.touch(DIGEST)
    await store.touch("f" * 64)


async def test_a_touch_makes_a_local_blob_young(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    await upload(store, CONTENT)
    os.utime(tmp_path / "blobs" / DIGEST, (1000, 1000))
    assert await store.last_used() == {DIGEST: 1000}
    await store.touch(DIGEST)
    reported = (await store.last_used())[DIGEST]
    assert reported is not None and reported > 1000


async def test_a_wrong_digest_drops_the_upload(opener: Opener) -> None:
    store = opener()
    wrong = b"!" + CONTENT[1:]
    with pytest.raises(CorruptImage, match="does not match"):
        await store.append(DIGEST, 0, pieces(*split(wrong)), total=len(CONTENT))
    assert await store.partial_size(DIGEST) == 0
    assert await store.size(DIGEST) is None
    assert await upload(store, CONTENT) == len(CONTENT)


async def test_more_than_announced_is_refused(opener: Opener) -> None:
    with pytest.raises(Conflict, match="longer"):
        await opener().append(DIGEST, 0, pieces(*split(CONTENT)), total=1000)


@pytest.mark.parametrize(
    "digest", ["", "abc", "../" * 21 + "x", DIGEST.upper(), DIGEST + "\n", "g" * 64, "/etc/passwd"]
)
async def test_only_digests_are_names(opener: Opener, digest: str) -> None:
    store = opener()
    asked = (
        store.size(digest),
        store.partial_size(digest),
        store.read(digest, limit=10),
        store.delete(digest),
    )
    for one in (*asked, store.append(digest, 0, pieces(b"x"), total=1)):
        with pytest.raises(InvalidRecord):
            await one
    with pytest.raises(InvalidRecord):
        store.open_blob(digest)


async def test_a_store_belongs_to_the_first_cluster_that_claims_it(opener: Opener) -> None:
    store = opener()
    assert await store.cluster() is None
    assert await store.claim("one") == "one"
    assert await opener().claim("two") == "one"
    assert await opener().cluster() == "one"


def test_threads_read_a_blob_at_once(opener: Opener) -> None:
    store = opener()
    asyncio.run(upload(store, CONTENT))
    reader = store.open_blob(DIGEST)
    assert reader.size == len(CONTENT)
    image = memoryview(bytearray(len(CONTENT)))
    starts = range(0, len(CONTENT), 100_000)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda start: reader.read_into(start, image[start : start + 100_000]), starts))
    assert bytes(image) == CONTENT
    reader.read_into(len(CONTENT), memoryview(bytearray()))
    for offset in (-1, len(CONTENT) - 5):
        with pytest.raises(ValueError, match="not within"):
            reader.read_into(offset, memoryview(bytearray(10)))
    reader.close()
    reader.close()


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 5000), max_size=6), reopen=st.booleans())
def test_any_way_of_cutting_an_upload_gives_the_blob(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], reopen: bool
) -> None:
    content = CONTENT[:5000]
    digest = hashlib.sha256(content).hexdigest()
    folder = tmp_path_factory.mktemp("cuts")

    async def scenario(make: Opener) -> None:
        store = make()
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 5000], strict=True):
            store = make() if reopen else store
            assert await store.append(digest, start, pieces(content[start:end]), total=5000) == end
        assert await store.read(digest, limit=5000) == content

    asyncio.run(scenario(lambda: LocalStore(folder)))
    asyncio.run(scenario(lambda: FsspecStore(f"memory://{folder.name}")))


# --- local only -----------------------------------------------------------------------------------


async def test_an_upload_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("a byte was asked for")
        yield b""

    with pytest.raises(StoreFull, match="bytes free"):
        await LocalStore(tmp_path).append(DIGEST, 0, never(), total=1 << 60)
    assert not list((tmp_path / "partial").iterdir())


async def test_bytes_that_another_process_wrote_are_not_trusted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.append(DIGEST, 0, pieces(CONTENT[:1000]), total=len(CONTENT))
    (tmp_path / "partial" / DIGEST).write_bytes(b"?" * 1000)
    with pytest.raises(CorruptImage):
        await upload(store, CONTENT, 1000)
    assert await store.partial_size(DIGEST) == 0


async def test_a_damaged_blob_is_noticed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await upload(store, CONTENT)
    (tmp_path / "blobs" / DIGEST).write_bytes(b"!" + CONTENT[1:])
    with pytest.raises(CorruptImage, match=DIGEST):
        await store.read(DIGEST, limit=1 << 30)
    reader = store.open_blob(DIGEST)
    (tmp_path / "blobs" / DIGEST).write_bytes(b"")
    with pytest.raises(StoreError, match="truncated"):
        reader.read_into(0, memoryview(bytearray(10)))
    reader.close()


# --- which store ----------------------------------------------------------------------------------


# --- where checkpoints come from ------------------------------------------------------------------


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert checkpoint_from(tmp_path) == Checkpoint(folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint_from(str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        checkpoint_from("./no/such/folder")


def test_a_hub_id_that_cannot_be_fetched_is_named() -> None:
    # A process of its own: the hub's library reads its environment when it is imported.
    program = "from registry.images.source import checkpoint_from; checkpoint_from('someone/some-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("registry.errors.CheckpointError: 'someone/some-model' is not a local folder")
