"""A node of a cast as a process of its own, which can be killed."""

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rdmacast.cast import Cast
from rdmacast.cast_spec import CastSpec, Member
from rdmacast.connector import Connector
from rdmacast.errors import BlocksLost
from rdmacast.region import GrowingRegion
from rdmacast.region_server import RegionServer
from rdmacast.tcp import TcpTransport
from rdmacast.waiting import run_in_thread
from rdmacast.watching import RegionWatcher
from tests.cast_fixture import LINK, PATIENT, SECRET
from tests.patience import PATIENCE_S

BLOCK_BYTES = 64 << 10
RATE_BYTES_S = 4e6  # slow enough that a node dies in the middle
_PROCESSES = multiprocessing.get_context("fork")


class NodeProcess:
    """One node; its parent speaks to it over a pipe."""

    def __init__(self, name: str, content: bytes, *, holds: bool, rate_bytes_s: float = RATE_BYTES_S) -> None:
        self.name = name
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(
            target=_main, args=(theirs, name, content, holds, rate_bytes_s), daemon=True
        )
        self._process.start()
        theirs.close()
        self.member = Member(name=name, address=self.hears("address"))

    def begin(self, spec: CastSpec) -> None:
        self._pipe.send(spec)

    def hears(self, kind: str) -> Any:
        """What the node says next of that kind."""
        while True:
            assert self._pipe.poll(PATIENCE_S), f"{self.name} says nothing of {kind}"
            said, value = self._pipe.recv()
            if said == kind:
                return value

    def holds(self, blocks: int) -> None:
        """Wait until the node has pulled so many blocks."""
        while self.hears("block") < blocks:
            pass

    def cancel(self) -> int:
        """Have it give up its part in the cast. How many blocks it has then."""
        self._pipe.send("cancel")
        return int(self.hears("left"))

    def more(self) -> tuple[int, int]:
        """Files and tasks that it has, once it gave up, and had not before its part."""
        self._pipe.send("more")
        files, tasks = self.hears("more")
        return files, tasks

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(PATIENCE_S)

    def stop(self) -> int | None:
        """Its exit code."""
        if self._process.is_alive():
            self._pipe.send("stop")
        self._process.join(PATIENCE_S)
        self._pipe.close()
        return self._process.exitcode


def spec_of(nodes: Sequence[NodeProcess], sources: int, nbytes: int, planner: str) -> CastSpec:
    return CastSpec(
        cast="c",
        region="image",
        nbytes=nbytes,
        block_bytes=BLOCK_BYTES,
        members=tuple(node.member for node in nodes),
        sources=tuple(range(sources)),
        planner=planner,
    )


def belongings() -> tuple[int, set[asyncio.Task[Any]]]:
    """How many files this process has open, and the tasks that run in it."""
    return len(list(Path("/proc/self/fd").iterdir())), asyncio.all_tasks()


async def more_than(before: tuple[int, set[asyncio.Task[Any]]]) -> tuple[int, int]:
    """How much this process has and had not before, once what hears of peers that hung up has ended: nothing,
    unless that does not end."""
    files, tasks = before
    ending = asyncio.all_tasks() - tasks
    if ending:
        await asyncio.wait(ending, timeout=PATIENCE_S / 2)
    files_now, tasks_now = belongings()
    return max(0, files_now - files), len(tasks_now - tasks)


def _main(pipe: Connection, name: str, content: bytes, holds: bool, rate_bytes_s: float) -> None:
    asyncio.run(_serve(pipe, name, content, holds, rate_bytes_s))


async def _serve(pipe: Connection, name: str, content: bytes, holds: bool, rate_bytes_s: float) -> None:
    buffer = bytearray(content) if holds else bytearray(len(content))
    region = GrowingRegion(buffer, complete=holds)
    async with RegionServer(SECRET, host=name, link_rate_bytes_s=rate_bytes_s, settings=LINK) as server:
        server.publish("image", region)
        pipe.send(("address", server.address))
        spec = await run_in_thread(None, pipe.recv)
        before = belongings()
        told = asyncio.ensure_future(run_in_thread(None, pipe.recv))
        if not holds:
            part = asyncio.ensure_future(_pull(pipe, name, spec, buffer, region, content))
            await asyncio.wait({part, told}, return_when=asyncio.FIRST_COMPLETED)
            if not part.done():  # told to cancel
                part.cancel()
                await asyncio.wait({part})
                pipe.send(("left", region.have_map(BLOCK_BYTES).held.bit_count()))
                await run_in_thread(None, pipe.recv)
                pipe.send(("more", await more_than(before)))
                told = asyncio.ensure_future(run_in_thread(None, pipe.recv))
            else:
                part.result()
        await told


async def _pull(
    pipe: Connection, name: str, spec: CastSpec, buffer: bytearray, region: GrowingRegion, content: bytes
) -> None:
    blocks = 0

    def on_block(offset: int, nbytes: int) -> None:
        nonlocal blocks
        blocks += 1
        pipe.send(("block", blocks))

    part = Cast(
        spec,
        name,
        memoryview(buffer),
        connector=Connector(name, [TcpTransport(SECRET, settings=LINK)]),
        watcher=RegionWatcher(SECRET, settings=LINK),
        check=lambda offset, view: [0] if view != content[offset : offset + len(view)] else [],
        on_block=on_block,
        region=region,
        settings=PATIENT,
    )
    try:
        report = await part.run()
    except BlocksLost as error:
        pipe.send(("lost", (error.blocks, region.have_map(BLOCK_BYTES).held)))
        return
    pipe.send(("slow", report.slow))
    pipe.send(("done", (hashlib.sha256(buffer).hexdigest(), tuple(report.faults.lost))))
