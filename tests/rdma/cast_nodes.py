"""A cast whose nodes are processes that read from each other by RDMA, for tests in the guest."""

import asyncio
import multiprocessing
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rdmacast.cast.hooks import BlockHooks
from rdmacast.cast.links import CastLinks
from rdmacast.cast.record import CastMember, CastPlan
from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.cast.runner import Cast
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.cast.spec import CastSpec
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import PeerAddress
from rdmacast.transports.connector import Connector
from rdmacast.transports.verbs.exporter import VerbsExporter
from rdmacast.transports.verbs.node import open_node
from rdmacast.transports.verbs.transport import VerbsTransport

SECRET = b"a secret of the cluster"
BLOCK_BYTES = 128 << 10
BLOCKS = 32
NBYTES = BLOCKS * BLOCK_BYTES - 77
CONTENT = random.Random(9).randbytes(NBYTES)
# The emulated processor is slow, and the machine under it may be busy.
SETTINGS = SessionSettings(pull_timeout_s=120.0, ask_timeout_s=30.0, patience_s=5.0)


@dataclass(frozen=True)
class Ended:
    """How a node's cast went, in values that a pipe can carry."""

    right: bool
    by_transport: dict[str, int]
    by_peer: dict[str, int]
    damaged: int
    lost: dict[str, str]


class DamagingRegion(GrowingRegion):
    """Gives a flipped byte the first time that it is asked for a range with one of the `bad` offsets."""

    def __init__(self, buffer: bytes, bad: set[int]) -> None:
        super().__init__(buffer)
        self._bad = bad

    def view(self, offset: int, nbytes: int) -> memoryview:
        view = super().view(offset, nbytes)
        hit = {bad for bad in self._bad if offset <= bad < offset + nbytes}
        if not hit:
            return view
        self._bad -= hit
        damaged = bytearray(view)
        for bad in hit:
            damaged[bad - offset] ^= 1
        return memoryview(damaged).toreadonly()


@dataclass
class Node:
    """One process; what it says comes by `pipe`: its address, how many blocks came at each, then an Ended."""

    name: str
    process: multiprocessing.Process
    pipe: Connection
    address: PeerAddress

    def hear_until(self, wanted: Callable[[object], bool]) -> object:
        while not wanted(said := self.pipe.recv()):
            pass
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start(name: str, *, holds: bool, bad: set[int] | None = None) -> Node:
    """Forked, since to import everything anew takes the guest long. No device may be open here."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(name, theirs, holds, bad or set()), daemon=True)
    process.start()
    theirs.close()
    address = ours.recv()
    assert isinstance(address, PeerAddress)
    return Node(name, process, ours, address)


def spec_of(nodes: list[Node], planner: str) -> CastSpec:
    plan = CastPlan(
        cast_id="c1",
        image="image",
        nbytes=NBYTES,
        block_bytes=BLOCK_BYTES,
        members=tuple(
            CastMember(node=node.name, host=node.address.host, address=node.address.url) for node in nodes
        ),
        sources=(0,),
        planned=len(nodes),
        planner=planner,
    )
    return CastSpec(plan=plan)


def _run(name: str, pipe: Connection, holds: bool, bad: set[int]) -> None:
    asyncio.run(_node(name, pipe, holds, bad))


async def _node(name: str, pipe: Connection, holds: bool, bad: set[int]) -> None:
    buffer = bytearray(CONTENT if holds else NBYTES)
    region = DamagingRegion(CONTENT, bad) if holds else GrowingRegion(buffer)
    with open_node() as verbs:
        async with RegionServer(SECRET, host=name, exporters=[VerbsExporter(verbs)]) as server:
            server.publish("image", region)
            pipe.send(server.address)
            reported = _inbox(pipe)
            if holds:
                while (share := await reported.get()) is not None:
                    region.mark(0, share)
                return
            spec = await reported.get()
            transport = VerbsTransport(SECRET, verbs)
            had = 0

            def came(offset: int, nbytes: int) -> None:
                nonlocal had
                had += 1
                pipe.send(had)

            report = await Cast(
                spec,
                name,
                memoryview(buffer),
                links=CastLinks(connector=Connector(name, [transport]), watcher=RegionWatcher(SECRET)),
                hooks=BlockHooks(
                    check=lambda at, view: (
                        [] if view == CONTENT[at : at + len(view)] else [at // BLOCK_BYTES]
                    ),
                    on_block=came,
                ),
                region=region,
                settings=SETTINGS,
            ).run()
            pipe.send(
                Ended(
                    right=buffer == CONTENT,
                    by_transport=dict(report.bytes_by_transport),
                    by_peer=dict(report.bytes_by_peer),
                    damaged=report.faults.damaged,
                    lost=dict(report.faults.lost),
                )
            )
            await reported.get()


def _inbox(pipe: Connection) -> "asyncio.Queue[object]":
    """Return a queue of the test's messages, filled by a thread."""
    loop, inbox = asyncio.get_running_loop(), asyncio.Queue[object]()

    def receive() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, pipe.recv())
        except (EOFError, OSError, RuntimeError):
            pass  # the test is over

    threading.Thread(target=receive, daemon=True).start()
    return inbox
