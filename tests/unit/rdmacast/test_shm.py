"""The transport of one host: which files it opens, and files that change under it."""

import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rdmacast.errors import CastError, NotShared
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import CheckingLink, Link, PeerAddress
from rdmacast.transports.shm.transport import ShmTransport
from tests.fixtures.transport import CONTENT, NBYTES, SECRET


@pytest.mark.parametrize("trick", ["link", "outside", "size", "folder", "missing", "none", "relative"])
async def test_shm_opens_only_what_it_may(trick: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    content = CONTENT[:1000]
    good = root / "good"
    good.write_bytes(content)
    (root / "folder").mkdir()
    (root / "link").symlink_to(good)
    (tmp_path / "outside").write_bytes(content)
    (root / "size").write_bytes(content + b"x")
    paths = {
        "link": root / "link",
        "outside": tmp_path / "outside",
        "size": root / "size",
        "folder": root / "folder",
        "missing": root / "missing",
        "none": None,
        "relative": Path("good"),
    }
    async with RegionServer(SECRET, host="a") as server:
        path = paths[trick]
        shm_path = str(path) if path else None
        server.publish("bad", GrowingRegion(content, shm_path=shm_path, complete=True))
        server.publish("good", GrowingRegion(content, shm_path=str(good), complete=True))
        async with ShmTransport(SECRET, root=root).connect(server.address) as link:
            with pytest.raises(NotShared):
                await link.read_into("bad", 0, memoryview(bytearray(1000)))
            buffer = bytearray(1000)
            await link.read_into("good", 0, memoryview(buffer))
            assert buffer == content


async def test_shm_follows_a_region_that_is_published_anew(tmp_path: Path) -> None:
    async with RegionServer(SECRET, host="a") as server:
        async with ShmTransport(SECRET).connect(server.address) as link:
            for content in (b"one" * 100, b"two" * 100):
                path = tmp_path / content[:3].decode()
                path.write_bytes(content)
                server.publish("image", GrowingRegion(content, shm_path=str(path), complete=True))
                buffer = bytearray(300)
                await link.read_into("image", 0, memoryview(buffer))
                assert buffer == content
                await server.withdraw("image")


async def test_shm_refuses_a_server_that_is_on_another_host() -> None:
    async with RegionServer(SECRET, host="b") as server:
        with pytest.raises(CastError, match="on host 'b'"):
            async with ShmTransport(SECRET).connect(PeerAddress(url=server.address.url, host="a")):
                pass


async def test_a_shortened_file_reads_short_and_does_not_kill(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        buffer = memoryview(bytearray(NBYTES))
        await link.read_into("image", 0, buffer)
        os.truncate(tmp_path / "image", 1000)
        with pytest.raises(NotShared, match="ends at 1000"):
            await link.read_into("image", 0, buffer)


@asynccontextmanager
async def linked(folder: Path, **options: Any) -> AsyncIterator[Link]:
    """Yield a link to a peer whose region "image" is a file of this name, which has CONTENT."""
    path = folder / "image"
    path.write_bytes(CONTENT)
    async with RegionServer(SECRET, host="a") as server:
        server.publish("image", GrowingRegion(CONTENT, shm_path=str(path), complete=True))
        async with ShmTransport(SECRET, **options).connect(server.address) as link:
            yield link


class _CountingExecutor(ThreadPoolExecutor):
    turns = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self.turns += 1
        return super().submit(fn, *args, **kwargs)


async def test_each_piece_is_checked_right_after_it_came_in_one_turn_of_a_thread(tmp_path: Path) -> None:
    buffer, offset, piece_bytes = bytearray(NBYTES - 5000), 5000, 300_000
    pieces: list[tuple[int, int]] = []

    def check(at: int, view: memoryview) -> list[int]:
        pieces.append((at, len(view)))
        assert view == CONTENT[at : at + len(view)]
        assert not any(buffer[at - offset + len(view) :])  # what follows has not come yet
        return [len(pieces)] if len(pieces) in (2, 3) else []

    with _CountingExecutor(1) as executor:
        async with linked(tmp_path, executor=executor) as link:
            assert isinstance(link, CheckingLink)
            damaged = await link.read_checked("image", offset, memoryview(buffer), check, piece_bytes)
            assert link.received_bytes == len(buffer)
    assert damaged == [2, 3]
    assert executor.turns == 1
    assert buffer == CONTENT[offset:]
    assert pieces == [(at, min(piece_bytes, NBYTES - at)) for at in range(offset, NBYTES, piece_bytes)]


async def test_what_a_check_raises_ends_the_read(tmp_path: Path) -> None:
    def check(_at: int, _view: memoryview) -> list[int]:
        raise ValueError("no such unit")

    async with linked(tmp_path) as link:
        assert isinstance(link, CheckingLink)
        with pytest.raises(ValueError, match="no such unit"):
            await link.read_checked("image", 0, memoryview(bytearray(NBYTES)), check, 1000)
