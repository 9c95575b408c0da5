"""A node of a cast, as one process: `python -m benchmarks.multicast_node SOCKET RANK LISTEN HOST FOLDER`.

It serves what it has at LISTEN (`tcp://address:port`) and takes part in the casts that its crew orders.
HOST names the machine that it stands for: nodes of one host read each other's memory. With a FOLDER the
image is in a file there, else ("-") in memory of its own.
"""

import asyncio
import gc
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.copies import COPIES, copy_as, damaged_units
from benchmarks.crew_member import Bytes, HeldImage
from benchmarks.crew_messages import (
    Answer,
    CastTask,
    Check,
    Done,
    Failed,
    Go,
    Hello,
    NodeAt,
    Order,
    Prepare,
    Ready,
    block_bytes,
    decode_order,
    encode,
)
from rdmacast.cast import Cast
from rdmacast.cast_spec import CastSpec, Member
from rdmacast.connector import Connector
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.session_settings import SessionSettings
from rdmacast.shm import ShmTransport
from rdmacast.tcp import TcpTransport
from rdmacast.transport import PeerAddress
from rdmacast.watching import RegionWatcher
from registry.images.manifest import UNIT_BYTES

SECRET = b"of a benchmark, for its own processes"
_THREADS = 2  # check blocks; with shared memory they also copy
_LINE_BYTES = 16 << 20


class CastNode:
    """Keeps one image at a time, and its region served until the next."""

    def __init__(self, rank: int, server: RegionServer, host: str, folder: Path | None) -> None:
        self._rank = rank
        self._server = server
        self._executor = ThreadPoolExecutor(_THREADS)
        transports = (
            [TcpTransport(SECRET)] if folder is None else [ShmTransport(SECRET, executor=self._executor)]
        )
        self._connector = Connector(host, transports)
        self._watcher = RegionWatcher(SECRET)
        self._folder = folder
        self._held = HeldImage(self._room)
        self._order: Prepare | None = None
        self._region: GrowingRegion | None = None

    async def carry_out(self, order: Order) -> Answer:
        match order:
            case Prepare():
                await self._prepare(order)
                return Ready()
            case Go():
                self._held.begin()
                return await self._cast()
            case Check():
                return self._held.checked()

    async def _prepare(self, order: Prepare) -> None:
        assert order.task is not None
        if self._order is not None:
            await self._server.withdraw(self._order.cast)
        is_source = self._rank < order.task.sources
        self._held.prepare(order.nbytes, order.seed, source=is_source)
        path = str(self._path_of(self._rank)) if self._folder else None
        self._region = GrowingRegion(self._held.image.data, shm_path=path, complete=is_source)
        self._server.publish(order.cast, self._region)
        self._order = order

    async def _cast(self) -> Done:
        order, region = self._order, self._region
        assert order is not None and order.task is not None and region is not None
        began_s = time.monotonic()
        if self._rank < order.task.sources:
            return Done(began_s=began_s, ended_s=began_s)
        if order.task.planner in COPIES:
            return copy_as(order.task.planner, self._path_of(0), self._held.image, order.units)
        spec = spec_of(order, order.task)
        arrived_s = [0.0] * spec.blocks

        def on_block(offset: int, nbytes: int) -> None:
            arrived_s[offset // spec.block_bytes] = time.monotonic()

        report = await Cast(
            spec,
            str(self._rank),
            self._held.image.data,
            connector=self._connector,
            watcher=self._watcher,
            check=lambda offset, view: damaged_units(order.units, offset, view),
            check_bytes=UNIT_BYTES,
            on_block=on_block,
            region=region,
            settings=SessionSettings(window=order.task.window),
            executor=self._executor,
        ).run()
        faults = report.faults
        return Done(
            began_s=began_s,
            ended_s=max(arrived_s),
            arrived_s=arrived_s,
            transports=dict(report.bytes_by_transport),
            faults={
                "damaged": faults.damaged,
                "late": faults.late,
                "failed": faults.failed,
                "replanned": faults.replanned,
                "slow": len(report.slow),
            },
        )

    def _path_of(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"image-{rank}"

    def _room(self, nbytes: int) -> Bytes:
        if self._folder is None:
            return np.empty(nbytes, np.uint8)
        with self._path_of(self._rank).open("wb+") as file:
            file.truncate(nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)


def spec_of(order: Prepare, task: CastTask) -> CastSpec:
    """Blocks of whole units, so many as were asked for or, where the units do not divide so, fewer."""
    return CastSpec(
        cast=order.cast,
        region=order.cast,
        nbytes=order.nbytes,
        block_bytes=block_bytes(order.nbytes, task.blocks),
        members=tuple(member(rank, node) for rank, node in enumerate(order.nodes)),
        sources=tuple(range(task.sources)),
        planner=task.planner,
        in_turn=task.in_turn,
        link_bytes_s=task.link_bytes_s,
    )


def member(rank: int, node: NodeAt) -> Member:
    return Member(name=str(rank), address=PeerAddress(url=node.url, host=node.host))


async def serve(path: str, rank: int, listen: str, host: str, folder: Path | None) -> None:
    """Carry out orders until the crew hangs up."""
    reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_BYTES)
    try:
        async with RegionServer(SECRET, listen, host) as server:
            node = CastNode(rank, server, host, folder)
            writer.write(encode(Hello(rank=rank, url=server.address.url, host=host)) + b"\n")
            while line := await reader.readline():
                try:
                    answer = await node.carry_out(decode_order(line))
                except Exception as error:  # whatever it is, the crew is told; then it ends this
                    writer.write(encode(Failed(reason=repr(error))) + b"\n")
                    await writer.drain()
                    raise
                writer.write(encode(answer) + b"\n")
                await writer.drain()
    finally:
        writer.close()


def main() -> None:
    path, rank, listen, host, folder = sys.argv[1:]
    gc.set_threshold(20_000, 20, 50)  # as nodes do
    uvloop.run(serve(path, int(rank), listen, host, None if folder == "-" else Path(folder)))


if __name__ == "__main__":
    main()
