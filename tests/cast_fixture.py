"""Casts of several nodes in one process: region servers on loopback, or the network in memory."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from rdmacast.cast import Cast, OnBlock
from rdmacast.cast_report import CastReport
from rdmacast.cast_spec import CastSpec, Member
from rdmacast.connector import Connector
from rdmacast.memory_transport import MemoryNetwork, MemoryTransport, MemoryWatcher
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.session_settings import SessionSettings
from rdmacast.settings import LinkSettings
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.transport import PeerAddress
from rdmacast.watching import RegionWatcher
from tests.patience import PATIENCE_S

SECRET = b"a secret of the cluster"
REGION = "image"
UNIT = 1000
BLOCK_BYTES = 4 * UNIT
BLOCKS = 25
NBYTES = (BLOCKS - 1) * BLOCK_BYTES + 123
CONTENT = random.Random(4).randbytes(NBYTES)
KINDS = ["memory", "tcp", "tcp-uvloop"]


def run(kind: str, work: Coroutine[None, None, None]) -> None:
    """On the event loop of the kind; faults in callbacks are failures."""
    faults: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        async with asyncio.timeout(PATIENCE_S):
            await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if kind.endswith("uvloop") else None) as runner:
        runner.run(main())
    assert not faults


def check(offset: int, view: memoryview) -> list[int]:
    """The units of the block at `offset` that differ from CONTENT."""
    return [
        (offset + start) // UNIT
        for start in range(0, len(view), UNIT)
        if view[start : start + UNIT] != CONTENT[offset + start : offset + start + UNIT][: len(view) - start]
    ]


# What is slow here is the machine: nobody is given up for it.
PATIENT = SessionSettings(
    pull_timeout_s=PATIENCE_S, ask_timeout_s=PATIENCE_S, patience_s=0.5, least_slow_s=PATIENCE_S
)
LINK = LinkSettings(handshake_timeout_s=PATIENCE_S, ping_interval_s=PATIENCE_S / 4, ping_timeout_s=PATIENCE_S)


class DamagedRegion(GrowingRegion):
    """Gives a flipped byte where it is asked for what covers one of the `bad` offsets: once, or always."""

    def __init__(self, buffer: memoryview, *, shm_path: str | None = None, complete: bool = False) -> None:
        super().__init__(buffer, shm_path=shm_path, complete=complete)
        self.bad: set[int] = set()
        self.always = False
        self.given = 0  # damaged views

    def view(self, offset: int, nbytes: int) -> memoryview:
        view = super().view(offset, nbytes)
        hit = {bad for bad in self.bad if offset <= bad < offset + nbytes}
        if not hit:
            return view
        if not self.always:
            self.bad -= hit
        self.given += 1
        damaged = bytearray(view)
        for bad in hit:
            damaged[bad - offset] ^= 0x40
        return memoryview(damaged).toreadonly()


class HangingRegion(GrowingRegion):
    """Says that it holds everything, and gives nothing."""

    def __init__(self, buffer: bytes) -> None:
        super().__init__(buffer, complete=True)

    async def wait_for(self, offset: int, nbytes: int) -> None:
        await asyncio.get_running_loop().create_future()


def mapped(path: Path) -> memoryview:
    """A new file of the region's size, mapped."""
    path.write_bytes(bytes(NBYTES))
    with path.open("r+b") as file:
        return memoryview(mmap(file.fileno(), NBYTES))


@dataclass(slots=True)
class Node:
    """A node of the rig; `server` is None in memory."""

    name: str
    address: PeerAddress
    buffer: memoryview
    region: DamagedRegion
    server: RegionServer | None
    cast: "asyncio.Task[CastReport] | None" = None


class Rig:
    """Some nodes, of which the first `sources` hold CONTENT."""

    def __init__(
        self,
        kind: str,
        nodes: int,
        sources: int,
        planner: str,
        settings: SessionSettings,
        loaded: int,
        in_turn: bool = False,
    ) -> None:
        self.kind = kind.partition("-")[0]
        self.network = MemoryNetwork()
        self.sources = tuple(range(sources))
        self.planner = planner
        self.in_turn = in_turn
        self.settings = settings
        self.nodes: list[Node] = []
        self.spec: CastSpec
        self._count = nodes
        self._loaded = loaded
        self._shared: Path | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        for index in range(self._count):
            await self._add(stack, index)
        self.spec = CastSpec(
            cast="c1",
            region=REGION,
            nbytes=NBYTES,
            block_bytes=BLOCK_BYTES,
            members=tuple(Member(name=node.name, address=node.address) for node in self.nodes),
            sources=self.sources,
            planner=self.planner,
            in_turn=self.in_turn,
        )

    async def _add(self, stack: AsyncExitStack, index: int) -> None:
        holds, name = index in self.sources, f"n{index}"
        path = self._folder(stack) / name if self.kind == "shm" else None
        buffer = memoryview(bytearray(NBYTES)) if path is None else mapped(path)
        if holds:
            buffer[:] = CONTENT
        region = DamagedRegion(
            buffer, shm_path=str(path) if path else None, complete=holds and self._loaded == BLOCKS
        )
        if holds and self._loaded < BLOCKS:
            region.mark(0, self._loaded * BLOCK_BYTES)
        if self.kind == "memory":
            address = self.network.add(PeerAddress(url=f"tcp://{name}:1", host=name), {REGION: region})
            self.nodes.append(Node(name, address, buffer, region, None))
            return
        host = "one" if self.kind == "shm" else name
        server = await stack.enter_async_context(RegionServer(SECRET, host=host, settings=LINK))
        server.publish(REGION, region)
        self.nodes.append(Node(name, server.address, buffer, region, server))

    def _folder(self, stack: AsyncExitStack) -> Path:
        if self._shared is None:
            self._shared = Path(stack.enter_context(TemporaryDirectory()))
        return self._shared

    def cast(self, index: int, *, held: Iterable[int] = (), on_block: OnBlock | None = None) -> Cast:
        node = self.nodes[index]
        memory = self.kind == "memory"
        tcp, memory_tcp = TcpTransport(SECRET, settings=LINK), MemoryTransport(self.network, name="tcp")
        return Cast(
            self.spec,
            node.name,
            node.buffer,
            connector=Connector(
                node.address.host, [memory_tcp] if memory else [tcp, ShmTransport(SECRET, settings=LINK)]
            ),
            watcher=MemoryWatcher(self.network) if memory else RegionWatcher(SECRET, settings=LINK),
            check=check,
            check_bytes=UNIT,
            on_block=on_block,
            region=node.region,
            held=held,
            settings=self.settings,
        )

    def start(self, *indexes: int) -> None:
        for index in indexes or range(len(self.sources), len(self.nodes)):
            self.nodes[index].cast = asyncio.create_task(self.cast(index).run())

    async def reports(self) -> list[CastReport]:
        """Of all that were started and not killed, once they have ended with the right bytes."""
        running = [node for node in self.nodes if node.cast is not None]
        reports = await asyncio.gather(*(node.cast for node in running if node.cast is not None))
        for node in running:
            assert node.buffer == CONTENT, node.name
        return list(reports)

    def finish_loading(self, *indexes: int) -> None:
        for index in indexes or self.sources:
            self.nodes[index].region.complete()

    async def kill(self, index: int) -> None:
        """As kill -9 does: the node hears and says no more."""
        node = self.nodes[index]
        if node.cast is not None:
            node.cast.cancel()
            await asyncio.wait({node.cast})
            node.cast = None
        if node.server is not None:
            await node.server.aclose()
        else:
            self.network.kill(node.address)

    async def holds(self, index: int, blocks: int) -> None:
        """Wait until the node has so many blocks."""
        region, changed = self.nodes[index].region, asyncio.Event()
        with region.watch(changed.set):
            while region.have_map(BLOCK_BYTES).held.bit_count() < blocks:
                changed.clear()
                await changed.wait()


@asynccontextmanager
async def make_rig(
    kind: str,
    nodes: int,
    sources: int = 1,
    planner: str = "binomial",
    settings: SessionSettings = PATIENT,
    loaded: int = BLOCKS,
    in_turn: bool = False,
) -> AsyncIterator[Rig]:
    """`kind` is one of KINDS. Sources hold the first `loaded` blocks. When it ends, no task is left over."""
    before = asyncio.all_tasks()
    rig = Rig(kind, nodes, sources, planner, settings, loaded, in_turn)
    async with AsyncExitStack() as stack:
        await rig.open(stack)
        yield rig
    assert asyncio.all_tasks() <= before
