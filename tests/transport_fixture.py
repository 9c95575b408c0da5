"""A peer that serves one region, and a link to it by any transport, for tests.

Kinds: memory, shm, tcp, verbs (a real RDMA device) and fabric (verbs over devices in memory).
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rdmacast.memory_transport import MemoryNetwork, MemoryTransport
from rdmacast.memory_verbs import MemoryDevice, MemoryFabric
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.transport import Link, PeerAddress, Transport
from rdmacast.verbs import VerbsTransport
from rdmacast.verbs_node import VerbsNode, open_node

SECRET = b"a secret of the cluster"


NBYTES = 3_000_000


CONTENT = bytes(os.urandom(NBYTES))


class WatchedRegion(GrowingRegion):
    """Says when somebody has to wait for it, and when somebody was given its bytes."""

    def __init__(self, content: bytes, *, shm_path: str | None = None, complete: bool = False) -> None:
        super().__init__(content, shm_path=shm_path, complete=complete)
        self.awaited = asyncio.Event()
        self.viewed = asyncio.Event()

    def view(self, offset: int, nbytes: int) -> memoryview:
        self.viewed.set()
        return super().view(offset, nbytes)

    async def wait_for(self, offset: int, nbytes: int) -> None:
        if not self.is_complete:
            self.awaited.set()
        await super().wait_for(offset, nbytes)


@dataclass(frozen=True, slots=True)
class Rig:
    """A peer that serves `region` (nothing of it marked yet) as "image", and a link to it."""

    region: WatchedRegion
    link: Link
    transport: Transport
    peer: PeerAddress
    withdraw: Callable[[], Awaitable[None]] | None


@asynccontextmanager
async def make_rig(kind: str, folder: Path, settings: LinkSettings | None = None) -> AsyncIterator[Rig]:
    path = folder / "image"
    path.write_bytes(CONTENT)
    region = WatchedRegion(CONTENT, shm_path=str(path))
    if kind == "memory":
        network = MemoryNetwork()
        peer = network.add(PeerAddress(url="tcp://peer:1", host="a"), {"image": region})
        memory = MemoryTransport(network)
        async with memory.connect(peer) as link:
            yield Rig(region, link, memory, peer, None)
        return
    with ExitStack() as stack:
        here, there = _nodes(kind, stack)
        async with RegionServer(SECRET, host="a", verbs=there, settings=settings) as server:
            server.publish("image", region)
            transport: Transport
            if kind == "shm":
                transport = ShmTransport(SECRET, root=folder, settings=settings)
            elif here is not None:
                transport = VerbsTransport(SECRET, here, settings=settings)
            else:
                transport = TcpTransport(SECRET, settings=settings)
            async with transport.connect(server.address) as link:
                yield Rig(region, link, transport, server.address, lambda: server.withdraw("image"))


def _nodes(kind: str, stack: ExitStack) -> tuple[VerbsNode | None, VerbsNode | None]:
    """The reader's and the server's."""
    if kind == "verbs":
        return stack.enter_context(open_node()), stack.enter_context(open_node())
    if kind == "fabric":
        fabric = MemoryFabric()
        here, there = (VerbsNode(MemoryDevice(fabric), name) for name in ("here", "there"))
        return stack.enter_context(here), stack.enter_context(there)
    return None, None
