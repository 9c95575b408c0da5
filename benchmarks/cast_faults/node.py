"""Run a node of benchmarks.cast_faults: `python -m benchmarks.cast_faults.node SOCKET NUMBER`.

The process takes part in one cast after another, as its crew orders.
"""

import asyncio
import gc
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
import xxhash

from benchmarks.cast_faults.links import BlockDamage, FaultyTransport, PacedRegion
from benchmarks.cast_faults.messages import (
    PROTOCOL,
    CastJoined,
    CastLeft,
    CountResources,
    FaultCastFinished,
    FaultOrder,
    FaultReply,
    FaultTask,
    JoinCast,
    LeaveCast,
    RegionsServed,
    ResourceCount,
    RunCast,
    ServeRegions,
)
from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import MemberHello
from benchmarks.multicast.copies import mismatched_units
from benchmarks.multicast.node import cast_spec, pull_faults
from benchmarks.multicast.rank import make_image
from rdmacast.cast.hooks import BlockHooks
from rdmacast.cast.links import CastLinks
from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.cast.runner import Cast
from rdmacast.cast.spec import CastSpec
from rdmacast.pacer import Pacer
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import Transport
from rdmacast.transports.connector import Connector
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport

SECRET = b"of a benchmark, for its own processes"
SHM = "shm"
HOST = "this"
_WIPED = b"\xff"
SETTLES_S = 10.0
_LOOK_S = 0.02
_THREADS = 2


@dataclass(frozen=True, slots=True)
class _JoinedCast:
    """A cast's memory here, its region, and the blocks that were kept."""

    order: JoinCast
    spec: CastSpec
    memory: mmap.mmap
    view: memoryview
    region: PacedRegion
    kept: tuple[int, ...]


class FaultNode:
    """A node that holds one image at a time; all methods run on the event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS)
        self._server: RegionServer | None = None
        self._rate_bytes_s = 0.0
        self._joined: _JoinedCast | None = None

    @property
    def server(self) -> RegionServer:
        assert self._server is not None, "it does not serve regions yet"
        return self._server

    @property
    def joined(self) -> _JoinedCast:
        assert self._joined is not None, "it has joined no cast"
        return self._joined

    async def carry_out(self, order: FaultOrder) -> FaultReply:
        match order:
            case ServeRegions():
                return await self._serve(order)
            case JoinCast():
                return self._hold(order)
            case RunCast():
                return await self._cast()
            case LeaveCast():
                return await self._end()
            case CountResources():
                regions = self._server.regions if self._server is not None else ()
                return ResourceCount(regions=list(regions), tasks=len(asyncio.all_tasks()))

    async def _serve(self, order: ServeRegions) -> RegionsServed:
        self._rate_bytes_s = order.rate_bytes_s
        self._server = RegionServer(SECRET, order.url, HOST, link_rate_bytes_s=order.rate_bytes_s)
        await self._server.start()
        return RegionsServed(url=self._server.address.url)

    def _hold(self, order: JoinCast) -> CastJoined:
        task, spec = order.task, spec_of(order.task, epoch=int(order.kept))
        is_source = order.rank < task.sources
        with Path(order.path).open("rb+" if order.kept else "wb+") as file:
            file.truncate(task.nbytes)
            memory = mmap.mmap(file.fileno(), task.nbytes)
        view, kept = memoryview(memory), tuple[int, ...]()
        if is_source:
            view[:] = make_image(task.nbytes, task.seed).data
        elif order.kept:
            kept = tuple(block for block in range(spec.blocks) if is_right(task, spec, block, view))
        else:
            # Overwritten, so that nothing looks received, and pre-faulted.
            view[:] = _WIPED * task.nbytes
        pacer = Pacer(self._rate_bytes_s) if task.transport == SHM else None
        region = PacedRegion(view, shm_path=order.path, complete=is_source, pacer=pacer)
        self._joined = _JoinedCast(order, spec, memory, view, region, kept)
        self.server.publish(task.cast, region)
        return CastJoined(blocks=len(kept))

    async def _cast(self) -> FaultCastFinished:
        joined, started_s = self.joined, time.monotonic()
        task, rank = joined.order.task, joined.order.rank
        if rank < task.sources:
            return FaultCastFinished(started_s=started_s, ended_s=started_s)
        damage = BlockDamage(task.damage, f"{task.cast} {rank} {joined.order.kept}")
        report = await Cast(
            joined.spec,
            str(rank),
            joined.view,
            links=CastLinks(
                connector=Connector(HOST, [self._transport(task, damage)]), watcher=RegionWatcher(SECRET)
            ),
            hooks=BlockHooks(
                check=damage.counting(partial(mismatched_units, task.units)), executor=self._executor
            ),
            region=joined.region,
            held=joined.kept,
        ).run()
        return FaultCastFinished(
            started_s=started_s,
            ended_s=time.monotonic(),
            nbytes=report.nbytes,
            found=damage.found,
            missed=damage.missed,
            lost=dict(report.faults.lost),
            faults=pull_faults(report),
        )

    async def _end(self) -> CastLeft:
        """Release the image. Raises BufferError if it stays referenced after peers have disconnected."""
        order, memory, view = self.joined.order, self.joined.memory, self.joined.view
        digest = xxhash.xxh3_128_hexdigest(view)
        await self.server.withdraw(order.task.cast)
        self._joined = None
        view.release()
        await closed(memory)
        remove(order.path)
        return CastLeft(digest=digest)

    def _transport(self, task: FaultTask, damage: BlockDamage) -> Transport:
        if task.transport == SHM:
            shm = ShmTransport(SECRET, executor=self._executor)
            return FaultyTransport(shm, damage, Pacer(self._rate_bytes_s))
        return FaultyTransport(TcpTransport(SECRET, link_rate_bytes_s=self._rate_bytes_s), damage, None)


def spec_of(task: FaultTask, epoch: int = 0) -> CastSpec:
    return cast_spec(
        task.cast,
        task.nbytes,
        task.blocks,
        urls=task.urls,
        hosts=[HOST] * len(task.urls),
        sources=tuple(range(task.sources)),
        planner=task.planner,
        epoch=epoch,
    )


def is_right(task: FaultTask, spec: CastSpec, block: int, view: memoryview) -> bool:
    offset, nbytes = spec.extent(block)
    return not mismatched_units(task.units, offset, view[offset : offset + nbytes])


def remove(path: str) -> None:
    Path(path).unlink()


async def closed(memory: mmap.mmap) -> None:
    """Close the memory once it is unreferenced. Raises BufferError.

    Peers that only watched the region release it shortly after its withdrawal.
    """
    deadline_s = time.monotonic() + SETTLES_S
    while True:
        gc.collect()
        try:
            memory.close()
            return
        except BufferError:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(_LOOK_S)


def main() -> None:
    path, number = sys.argv[1:]
    hello = MemberHello(rank=int(number))
    uvloop.run(serve_async(path, hello, PROTOCOL, FaultNode().carry_out))


if __name__ == "__main__":
    main()
