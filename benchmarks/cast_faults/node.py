"""A node of the casts of benchmarks/cast_faults.py: a process that takes part in one after the other.

Orders come on stdin, answers go to stdout, one JSON line each; it ends with its stdin.
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

from benchmarks.cast_faults_links import Damage, FaultyTransport, PacedRegion
from benchmarks.cast_faults_messages import (
    Answer,
    CastTask,
    Count,
    Counted,
    Done,
    End,
    Ended,
    Failed,
    Go,
    Hold,
    Holding,
    Order,
    Serve,
    Serving,
    decode_order,
    encode,
)
from benchmarks.copies import damaged_units
from benchmarks.crew_member import make_image
from benchmarks.crew_messages import block_bytes
from rdmacast.cast import Cast
from rdmacast.cast_spec import CastSpec, Member
from rdmacast.connector import Connector
from rdmacast.pacer import Pacer
from rdmacast.region_server import RegionServer
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.transport import PeerAddress, Transport
from rdmacast.watching import RegionWatcher

SECRET = b"of a benchmark, for its own processes"
SHM = "shm"
HOST = "this"
_WIPED = b"\xff"
SETTLES_S = 10.0
_LOOK_S = 0.02
_THREADS = 2
_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Held:
    """A cast's memory here, served, and the blocks of it that were kept."""

    order: Hold
    spec: CastSpec
    memory: mmap.mmap
    view: memoryview
    region: PacedRegion
    kept: tuple[int, ...]


class FaultNode:
    """Holds one image at a time. All methods belong to the event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS)
        self._server: RegionServer | None = None
        self._rate_bytes_s = 0.0
        self._held: _Held | None = None

    @property
    def server(self) -> RegionServer:
        assert self._server is not None, "it does not serve yet"
        return self._server

    @property
    def held(self) -> _Held:
        assert self._held is not None, "it holds nothing"
        return self._held

    async def carry_out(self, order: Order) -> Answer:
        match order:
            case Serve():
                return await self._serve(order)
            case Hold():
                return self._hold(order)
            case Go():
                return await self._cast()
            case End():
                return await self._end()
            case Count():
                regions = self._server.regions if self._server is not None else ()
                return Counted(regions=list(regions), tasks=len(asyncio.all_tasks()))

    async def _serve(self, order: Serve) -> Serving:
        self._rate_bytes_s = order.rate_bytes_s
        self._server = RegionServer(SECRET, order.url, HOST, link_rate_bytes_s=order.rate_bytes_s)
        await self._server.start()
        return Serving(url=self._server.address.url)

    def _hold(self, order: Hold) -> Holding:
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
            # Written, so that nothing looks as if it had come, and its pages are there.
            view[:] = _WIPED * task.nbytes
        pacer = Pacer(self._rate_bytes_s) if task.transport == SHM else None
        region = PacedRegion(view, shm_path=order.path, complete=is_source, pacer=pacer)
        self._held = _Held(order, spec, memory, view, region, kept)
        self.server.publish(task.cast, region)
        return Holding(blocks=len(kept))

    async def _cast(self) -> Done:
        held, began_s = self.held, time.monotonic()
        task, rank = held.order.task, held.order.rank
        if rank < task.sources:
            return Done(began_s=began_s, ended_s=began_s)
        damage = Damage(task.damage, f"{task.cast} {rank} {held.order.kept}")
        report = await Cast(
            held.spec,
            str(rank),
            held.view,
            connector=Connector(HOST, [self._transport(task, damage)]),
            watcher=RegionWatcher(SECRET),
            check=damage.watched(partial(damaged_units, task.units)),
            region=held.region,
            held=held.kept,
            executor=self._executor,
        ).run()
        faults = report.faults
        return Done(
            began_s=began_s,
            ended_s=time.monotonic(),
            nbytes=report.nbytes,
            found=damage.found,
            missed=damage.missed,
            lost=dict(faults.lost),
            faults={
                "damaged": faults.damaged,
                "late": faults.late,
                "failed": faults.failed,
                "replanned": faults.replanned,
            },
        )

    async def _end(self) -> Ended:
        """Raises BufferError if somebody refers to the memory for longer than it takes to hang up."""
        order, memory, view = self.held.order, self.held.memory, self.held.view
        told = xxhash.xxh3_128_hexdigest(view)
        await self.server.withdraw(order.task.cast)
        self._held = None
        view.release()
        await closed(memory)
        remove(order.path)
        return Ended(digest=told)

    def _transport(self, task: CastTask, damage: Damage) -> Transport:
        if task.transport == SHM:
            shm = ShmTransport(SECRET, executor=self._executor)
            return FaultyTransport(shm, damage, Pacer(self._rate_bytes_s))
        return FaultyTransport(TcpTransport(SECRET, link_rate_bytes_s=self._rate_bytes_s), damage, None)


def spec_of(task: CastTask, epoch: int = 0) -> CastSpec:
    return CastSpec(
        cast=task.cast,
        region=task.cast,
        nbytes=task.nbytes,
        block_bytes=block_bytes(task.nbytes, task.blocks),
        members=tuple(
            Member(name=str(rank), address=PeerAddress(url=url, host=HOST))
            for rank, url in enumerate(task.urls)
        ),
        sources=tuple(range(task.sources)),
        planner=task.planner,
        epoch=epoch,
    )


def is_right(task: CastTask, spec: CastSpec, block: int, view: memoryview) -> bool:
    offset, nbytes = spec.extent(block)
    return not damaged_units(task.units, offset, view[offset : offset + nbytes])


def remove(path: str) -> None:
    Path(path).unlink()


async def closed(memory: mmap.mmap) -> None:
    """Raises BufferError. Who only watched the region lets go of it a moment after its withdrawal."""
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


async def serve() -> None:
    """Carry out orders until nobody gives any."""
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    node = FaultNode()
    while line := await reader.readline():
        try:
            answer = await node.carry_out(decode_order(line))
        except Exception as error:  # the fleet is told, then this ends
            tell(Failed(reason=repr(error)))
            raise
        tell(answer)


def tell(answer: Answer) -> None:
    sys.stdout.buffer.write(encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    uvloop.run(serve())


if __name__ == "__main__":
    main()
