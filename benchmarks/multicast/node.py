"""Run a node of a cast: `python -m benchmarks.multicast.node SOCKET RANK LISTEN HOST FOLDER`.

It serves its regions at LISTEN (`tcp://address:port`) and takes part in the casts that its crew orders. HOST
names the machine that it represents: nodes of one host read each other's memory. With a FOLDER the image is
in a file there, with "-" in private memory.
"""

import gc
import mmap
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import MemberHello
from benchmarks.multicast.copies import COPIES, copy_as, mismatched_units
from benchmarks.multicast.messages import (
    PROTOCOL,
    CastFinished,
    ImageReady,
    MulticastOrder,
    MulticastReply,
    MulticastTask,
    PrepareImage,
    ReportDigest,
    StartCast,
    block_bytes,
)
from benchmarks.multicast.rank import Bytes, ImageBuffer
from rdmacast.cast.hooks import BlockHooks
from rdmacast.cast.links import CastLinks
from rdmacast.cast.record import NO_TIER, CastMember, CastPlan
from rdmacast.cast.region_watcher import RegionWatcher
from rdmacast.cast.report import CastReport
from rdmacast.cast.runner import Cast
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.cast.spec import CastSpec
from rdmacast.server.region import GrowingRegion
from rdmacast.server.region_server import RegionServer
from rdmacast.transport import PeerAddress
from rdmacast.transports.connector import Connector
from rdmacast.transports.kept_links import KeptLinks
from rdmacast.transports.shm.transport import ShmTransport
from rdmacast.transports.tcp import TcpTransport
from registry.images.manifest import UNIT_BYTES

SECRET = b"of a benchmark, for its own processes"
_THREADS = 2  # verify blocks, and copy them with shared memory


class MulticastNode:
    """A node that holds one image at a time, and serves its region until the next."""

    def __init__(self, rank: int, server: RegionServer, host: str, folder: Path | None) -> None:
        self._rank = rank
        self._server = server
        self._executor = ThreadPoolExecutor(_THREADS)
        transports = (
            [TcpTransport(SECRET)] if folder is None else [ShmTransport(SECRET, executor=self._executor)]
        )
        self._kept_links = CastLinks(
            connector=Connector(host, transports, kept=KeptLinks()), watcher=RegionWatcher(SECRET, keeps=True)
        )
        self._fresh_links = CastLinks(connector=Connector(host, transports), watcher=RegionWatcher(SECRET))
        self._folder = folder
        self._processors = sorted(os.sched_getaffinity(0))
        self._held = ImageBuffer(self._allocate)
        self._order: PrepareImage | None = None
        self._region: GrowingRegion | None = None

    async def carry_out(self, order: MulticastOrder) -> MulticastReply:
        match order:
            case PrepareImage():
                await self._prepare(order)
                return ImageReady()
            case StartCast():
                self._held.begin()
                return await self._cast()
            case ReportDigest():
                return self._held.report_digest()

    async def _prepare(self, order: PrepareImage) -> None:
        assert order.task is not None
        if self._order is not None:
            await self._server.withdraw(self._order.cast)
        if not order.task.fresh_links:  # as when nodes join
            peers = [PeerAddress(url=node.url, host=node.host) for node in order.nodes]
            await self._kept_links.prepare([one for rank, one in enumerate(peers) if rank != self._rank])
        self._pin(order.task)
        is_source = self._rank < order.task.sources
        self._held.prepare(order.nbytes, order.seed, source=is_source)
        path = str(self._path_of(self._rank)) if self._folder else None
        self._region = GrowingRegion(self._held.image.data, shm_path=path, complete=is_source)
        self._server.publish(order.cast, self._region)
        self._order = order

    def _pin(self, task: MulticastTask) -> None:
        """Move all threads of this process to the processors that the task gives it."""
        wanted = self._processors
        if task.apart and len(wanted) > 1:
            wanted = wanted[:1] if self._rank <= task.sources else wanted[1:]
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), wanted)

    async def _cast(self) -> CastFinished:
        order, region = self._order, self._region
        assert order is not None and order.task is not None and region is not None
        started_s = time.monotonic()
        if self._rank < order.task.sources:
            return CastFinished(started_s=started_s, ended_s=started_s)
        if order.task.planner in COPIES:
            return copy_as(order.task.planner, self._path_of(0), self._held.image, order.units)
        task = order.task
        spec = cast_spec(
            order.cast,
            order.nbytes,
            task.blocks,
            urls=[node.url for node in order.nodes],
            hosts=[node.host for node in order.nodes],
            sources=tuple(range(task.sources)),
            planner=task.planner,
            in_slots=task.in_slots,
            link_bytes_s=task.link_bytes_s,
            leaves=task.leaves,
        )
        arrived_s = [0.0] * spec.blocks

        def on_block(offset: int, nbytes: int) -> None:
            arrived_s[offset // spec.plan.block_bytes] = time.monotonic()

        report = await Cast(
            spec,
            str(self._rank),
            self._held.image.data,
            links=self._fresh_links if task.fresh_links else self._kept_links,
            hooks=BlockHooks(
                check=lambda offset, view: mismatched_units(order.units, offset, view),
                check_bytes=UNIT_BYTES,
                on_block=on_block,
                executor=self._executor,
            ),
            region=region,
            settings=SessionSettings(window=order.task.window),
        ).run()
        return CastFinished(
            started_s=started_s,
            ended_s=max(arrived_s),
            arrived_s=arrived_s,
            transports=dict(report.bytes_by_transport),
            faults={**pull_faults(report), "slow": len(report.slow)},
        )

    def _path_of(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"image-{rank}"

    def _allocate(self, nbytes: int) -> Bytes:
        if self._folder is None:
            return np.empty(nbytes, np.uint8)
        with self._path_of(self._rank).open("wb+") as file:
            file.truncate(nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)


def cast_spec(
    cast: str,
    nbytes: int,
    blocks: int,
    urls: Sequence[str],
    hosts: Sequence[str],
    sources: Sequence[int],
    leaves: Sequence[str] = (),
    **options: Any,
) -> CastSpec:
    """Return a cast of blocks of whole units from the sources to the other nodes."""
    members = tuple(
        CastMember(
            node=str(rank), host=host, address=url, leaf=leaf, tier="host" if rank in sources else NO_TIER
        )
        for rank, (url, host, leaf) in enumerate(zip(urls, hosts, leaves or [""] * len(urls), strict=True))
    )
    plan = CastPlan(
        cast_id=cast,
        image=cast,
        nbytes=nbytes,
        block_bytes=block_bytes(nbytes, blocks),
        members=members,
        planned=len(members),
        sources=tuple(sources),
        **options,
    )
    return CastSpec(plan=plan)


def pull_faults(report: CastReport) -> dict[str, int]:
    """Return how many pulls failed or were replanned, by kind."""
    return {name: getattr(report.faults, name) for name in ("damaged", "late", "failed", "replanned")}


async def serve(path: str, rank: int, listen: str, host: str, folder: Path | None) -> None:
    """Carry out orders until the benchmark closes the connection."""
    async with RegionServer(SECRET, listen, host) as server:
        node = MulticastNode(rank, server, host, folder)
        hello = MemberHello(rank=rank, url=server.address.url, host=host)
        await serve_async(path, hello, PROTOCOL, node.carry_out)


def main() -> None:
    path, rank, listen, host, folder = sys.argv[1:]
    gc.set_threshold(20_000, 20, 50)  # as in an invoker
    uvloop.run(serve(path, int(rank), listen, host, None if folder == "-" else Path(folder)))


if __name__ == "__main__":
    main()
