"""What nodes of other systems have: a disk that is read at its rate, a group that is set up first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.rival_nodes import EmulatedDiskReader, GroupWatcher
from rdmacast.transport import PeerAddress
from tests.fixtures.emulated import SleepTime


def test_reads_take_as_long_as_the_disk_does_one_after_another(tmp_path: Path) -> None:
    blob = bytes(range(256)) * 8192  # enough to be read past the page cache from a real disk
    (tmp_path / "blob").write_bytes(blob)
    time_s = SleepTime(now_s=0.0)
    clock = time_s.clock()
    readers = [EmulatedDiskReader(tmp_path / "blob", clock, bytes_per_s=1 << 20) for _ in range(2)]
    into = memoryview(bytearray(1 << 20))
    for place, reader in enumerate(readers, 1):
        assert reader.cached(0, len(into)) is None and not reader.is_direct
        reader.read_into(0, into)
        assert time_s.now_s == pytest.approx(place)
        assert into == blob[: 1 << 20]
        reader.close()


async def test_a_group_is_set_up_before_anything_is_watched() -> None:
    loop, watched = asyncio.get_running_loop(), list[float]()

    class Watcher:
        @asynccontextmanager
        async def watch(self, *_: Any) -> AsyncIterator[Any]:
            watched.append(loop.time())
            yield None

    began_s = loop.time()
    peer = PeerAddress(url="tcp://127.0.0.1:1", host="h1")
    async with GroupWatcher(Watcher(), 0.05).watch(peer, "region", 1, lambda have, number: None):
        pass
    assert watched[0] - began_s >= 0.05
