"""A peer that serves one region, and a link to it by any transport, for tests.

Kinds: memory, shm, tcp, tls (tcp within TLS); verbs (a real RDMA device), nixl (its package) and cuda_ipc
(a GPU); fabric, agents and lent are these three over fakes in memory.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rdmacast.cuda_ipc import CudaIpcTransport
from rdmacast.cuda_ipc_lender import GpuLender
from rdmacast.memory_nixl import MemoryNixl
from rdmacast.memory_transport import MemoryNetwork, MemoryTransport
from rdmacast.memory_verbs import MemoryDevice, MemoryFabric
from rdmacast.nixl import NixlTransport
from rdmacast.nixl_native import NativeDriver
from rdmacast.nixl_node import NixlNode
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.settings import LinkSettings
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.transport import Link, PeerAddress, Transport
from rdmacast.verbs import VerbsTransport
from rdmacast.verbs_node import VerbsNode, open_node
from tests.cuda_ipc_fixture import lent_by_fake, lent_by_process
from tests.tls_fixture import tls_of_nodes

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


class GpuRegion(WatchedRegion):
    """Is on a GPU, from `base` on (None: it is not)."""

    base: int | None = None

    def gpu_pointer(self, offset: int, nbytes: int) -> int | None:
        return None if self.base is None else self.base + offset


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
    region = GpuRegion(CONTENT, shm_path=str(path))
    if kind == "memory":
        network = MemoryNetwork()
        peer = network.add(PeerAddress(url="tcp://peer:1", host="a"), {"image": region})
        memory = MemoryTransport(network)
        async with memory.connect(peer) as link:
            yield Rig(region, link, memory, peer, None)
        return
    settings = settings or LinkSettings()
    with ExitStack() as stack:
        ends = _ends(kind, folder, region, settings, stack)
        async with RegionServer(
            SECRET,
            host="a",
            tls=ends.tls,
            verbs=ends.verbs,
            lender=ends.lender,
            nixl=ends.nixl,
            settings=settings,
        ) as server:
            server.publish("image", region)
            transport = ends.transport
            async with transport.connect(server.address) as link:
                yield Rig(region, link, transport, server.address, lambda: server.withdraw("image"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """The reader's transport, and what the server needs for it."""

    transport: Transport
    verbs: VerbsNode | None = None
    lender: GpuLender | None = None
    nixl: NixlNode | None = None
    tls: ssl.SSLContext | None = None


def _ends(kind: str, folder: Path, region: GpuRegion, settings: LinkSettings, stack: ExitStack) -> _Ends:
    match kind:
        case "shm":
            return _Ends(transport=ShmTransport(SECRET, root=folder, settings=settings))
        case "tcp":
            return _Ends(transport=TcpTransport(SECRET, settings=settings))
        case "tls":
            tls = tls_of_nodes()
            return _Ends(transport=TcpTransport(SECRET, tls=tls.client, settings=settings), tls=tls.server)
        case "verbs" | "fabric":
            fabric = MemoryFabric()
            here, there = (
                stack.enter_context(open_node() if kind == "verbs" else VerbsNode(MemoryDevice(fabric), name))
                for name in ("here", "there")
            )
            return _Ends(transport=VerbsTransport(SECRET, here, settings=settings), verbs=there)
        case "nixl" | "agents":
            driver = NativeDriver() if kind == "nixl" else MemoryNixl()
            reader, server = (stack.enter_context(NixlNode(driver)) for _ in range(2))
            return _Ends(transport=NixlTransport(SECRET, reader, settings=settings), nixl=server)
        case "cuda_ipc" | "lent":
            lent = lent_by_fake(CONTENT) if kind == "lent" else lent_by_process(CONTENT, folder / "image")
            lender, region.base, gpu = stack.enter_context(lent)
            return _Ends(transport=CudaIpcTransport(SECRET, gpu, settings=settings), lender=lender)
    raise ValueError(f"no such kind of transport: {kind}")
