"""No room: in the store, in shared memory, in the arena, in the host tier."""

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from invoker.base.errors import HostTierFull
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.tier import HostTier
from registry.errors import StoreFull
from registry.images.local_store import LocalStore
from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.mount import file_system
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import Platform

MIB = 1 << 20


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for piece in content:
        yield piece


async def test_a_disk_that_fills_up_during_an_upload_publishes_nothing_and_keeps_what_is_there(
    small_disk: Path,
):
    there, large = b"t" * MIB, b"l" * (2 * MIB)
    names = [hashlib.sha256(content).hexdigest() for content in (there, large)]

    async def writer() -> AsyncIterator[bytes]:
        yield large[:MIB]
        (small_disk / "other").write_bytes(b"o" * (MIB + MIB // 2))  # somebody else takes the rest
        yield large[MIB:]

    store = LocalStore(small_disk / "store")
    assert await store.append(names[0], 0, pieces(there), total=MIB) == MIB
    with pytest.raises(StoreFull, match="no space left"):
        await store.append(names[1], 0, writer(), total=2 * MIB)
    assert await store.digests() == [names[0]] and await store.size(names[1]) is None
    assert await store.partials() == {}  # it would be in the way of what frees the disk
    assert await store.read(names[0], limit=MIB) == there
    with pytest.raises(StoreFull, match="bytes free, the upload needs"):
        await store.append(names[1], 0, pieces(large), total=2 * MIB)
    (small_disk / "other").unlink()
    assert await store.append(names[1], 0, pieces(large), total=2 * MIB) == 2 * MIB
    assert await store.read(names[1], limit=2 * MIB) == large


def test_full_shared_memory_is_an_error_and_no_bus_error(small_disk: Path):
    tier = HostTier(small_disk / "tier", limit_bytes=64 * MIB)  # more than there is
    try:
        writer = tier.begin("a" * 64, 16 * MIB)
        assert isinstance(writer, ImageWriter)
        with pytest.raises(HostTierFull, match="is full"):
            for offset in range(0, 16 * MIB, MIB):
                writer.prepare(offset, MIB)
                writer.view[offset : offset + MIB] = b"x" * MIB
        writer.abandon()
        assert tier.images() == [] and tier.used_bytes() == 0
        smaller = tier.begin("b" * 64, MIB)
        assert isinstance(smaller, ImageWriter)
        smaller.prepare(0, MIB)
        smaller.view[:] = b"y" * MIB
        smaller.publish().close()
        assert [image.nbytes for image in tier.images()] == [MIB]
    finally:
        tier.close()


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One node whose arena and host tier take the small test model and not tiny-coder."""
    made = Platform(
        data=tmp_path_factory.mktemp("cramped"),
        flags=("--nodes", "1", "--gpu-memory", "8MiB", "--host-memory", "20MiB"),
    )
    made.up()
    yield made
    made.down()


def starts(platform: Platform) -> int:
    return (platform.data / "logs" / "node-0.log").read_text().count(": accepted")


def complete(platform: Platform, model: str) -> httpx2.Response:
    with platform.http() as http:
        return http.post("/v1/completions", json={"model": model, "prompt": [5, 6], "max_tokens": 2})


def test_a_model_that_does_not_fit_is_said_at_once_with_the_sizes_and_others_go_on(
    cramped: Platform, tmp_path: Path, root: Path
):
    write_checkpoint("llama", tmp_path / "small")
    cramped.run("deploy", str(tmp_path / "small"), "--name", "small")
    assert complete(cramped, "small").status_code == 200
    before = starts(cramped)
    large = str(root / "functions" / "tiny-coder")
    # At least one instance is wanted all the time: it is not tried all the time.
    cramped.run("deploy", large, "--name", "large", "--min-instances", "1")
    for _ in range(3):
        response = complete(cramped, "large")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "start_failed")
        assert "16133120 bytes" in error["message"] and str(8 * MIB) in error["message"]
        assert response.headers["retry-after"]
    assert complete(cramped, "small").status_code == 200
    assert starts(cramped) == before
    cramped.run("delete", "large", "--yes")


def test_an_image_larger_than_every_host_tier_fails_its_deploy(tmp_path: Path, root: Path):
    large = root / "functions" / "tiny-coder"
    platform = Platform(data=tmp_path / "data", flags=("--nodes", "1", "--host-memory", "8MiB"))
    platform.up()
    try:
        failed = platform.run("deploy", str(large), "--name", "large", check=False)
        assert failed.returncode == 5
        assert "16133120 bytes" in failed.stderr and str(8 * MIB) in failed.stderr
        assert platform.json("list") == []
    finally:
        platform.down()


@pytest.fixture(scope="module")
def on_small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """One node whose data is on a file system of 4 MiB."""
    with file_system(tmp_path_factory.mktemp("disk") / "small", "size=4m") as folder:
        made = Platform(data=folder / "data", flags=("--nodes", "1"))
        made.up()
        try:
            yield made
        finally:
            made.down()


def test_a_deploy_to_a_full_disk_says_so_without_trying_for_long(on_small_disk: Platform, root: Path):
    large = root / "functions" / "tiny-coder"
    failed = on_small_disk.run("deploy", str(large), "--name", "large", check=False)
    assert failed.returncode == 5 and "bytes free, the upload needs" in failed.stderr
    assert not list((on_small_disk.data / "store" / "partial").iterdir())
    assert on_small_disk.json("list") == []


def test_a_full_disk_under_redis_fails_requests_within_seconds_with_its_reason(
    on_small_disk: Platform, tmp_path: Path
):
    platform = on_small_disk
    write_checkpoint("llama", tmp_path / "model")
    filler = platform.data.parent / "fill"
    try:
        platform.run("deploy", str(tmp_path / "model"), "--name", "small", "--keep-alive", "200ms")
        assert complete(platform, "small").status_code == 200
        platform.until("it is asleep", lambda: not platform.instances("small"))
        with filler.open("wb", buffering=0) as fill, contextlib.suppress(OSError):
            while True:
                fill.write(bytes(4096))

        def refused() -> httpx2.Response | None:
            response = complete(platform, "small")
            return response if response.status_code == 503 else None

        began_s = time.monotonic()
        error = platform.until("a request is refused", refused).json()["error"]
        assert time.monotonic() - began_s < PATIENCE_S / 2
        assert error["code"] == "state_unavailable" and "No space left" in error["message"]
        with platform.http() as http:
            assert "No space left" in http.get("/health").json()["state_reason"]
        shown = platform.run("nodes")
        assert "the cluster's state is not being updated" in shown.stderr and "No space left" in shown.stderr
        filler.unlink()
        platform.until("it serves again", lambda: complete(platform, "small").status_code == 200)
        assert platform.run("nodes").stderr == ""
    finally:
        filler.unlink(missing_ok=True)
