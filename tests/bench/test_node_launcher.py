"""What the launcher changes about a node's sources."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.node_launcher import GroupWatcher, StartNode, sources_of
from invoker.loading.loader import LoadSources
from rdmacast.transport import PeerAddress

SOURCES = LoadSources(node="n0", host="h0", store=None, casts=None, device_buffer=lambda image: None)


def test_a_node_with_its_own_disk_takes_part_in_no_cast(tmp_path: Path) -> None:
    order = StartNode(argv=[], log="", store=str(tmp_path), disk_bytes_s=5e6)
    found = sources_of(order, SOURCES)
    assert found.casts is None and found.store is not None and found.store.label == "disk"
    assert sources_of(StartNode(argv=[], log=""), SOURCES) is SOURCES


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
