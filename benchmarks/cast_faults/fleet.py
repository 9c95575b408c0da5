"""The processes of a cast-faults benchmark: nodes that live from cast to cast, and one in reserve.

The reserve replaces a killed node at once: starting a process would take CPU from the others, which are
timed.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Self, TypeVar

from benchmarks.cast_faults.messages import (
    PROTOCOL,
    CountResources,
    FaultOrder,
    RegionsServed,
    ResourceCount,
    ServeRegions,
)
from benchmarks.cast_faults.node import SETTLES_S
from benchmarks.harness.crew import CrewError, CrewListener, CrewMember, Process
from benchmarks.harness.crew_messages import CrewMessage
from benchmarks.harness.processes import Processes, module
from benchmarks.harness.processor import open_descriptors

R = TypeVar("R", bound=CrewMessage)
ORDER_S = 60.0
_POLL_S = 0.05
_THREADS_PER_NODE = 4  # an order to a stopped node holds its thread until the node is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """What a node's process holds: open files by kind, mapped images, regions and tasks."""

    files: Mapping[str, int]
    mapped: int
    regions: tuple[str, ...]
    tasks: int

    def excess_over(self, before: "ResourceUse") -> str:
        """Describe what is held now and was not before, or return ""."""
        more = [
            f"{number} x {kind}" for kind, number in (Counter(self.files) - Counter(before.files)).items()
        ]
        more += [f"region {name}" for name in self.regions]
        more += [f"{self.mapped} mapped images"] if self.mapped > before.mapped else []
        more += [f"{self.tasks - before.tasks} tasks"] if self.tasks > before.tasks else []
        return ", ".join(more)


class FaultyProcess:
    """One node; `fresh` is what its process held before its first cast."""

    def __init__(self, process: Process, member: CrewMember, images: Path, pool: ThreadPoolExecutor) -> None:
        self._process = process
        self._member = member
        self._images = images
        self._pool = pool
        self.url = ""
        self.fresh: ResourceUse | None = None

    def __repr__(self) -> str:
        return f"FaultyProcess({self._process.pid} at {self.url or 'no address yet'})"

    async def serve(self, url: str, rate_bytes_s: float) -> None:
        """Have it serve regions. Raises CrewError."""
        self.url = (await self.ask(ServeRegions(url=url, rate_bytes_s=rate_bytes_s), RegionsServed)).url
        self.fresh = await self.resources()

    async def ask(self, order: FaultOrder, expected: type[R], patience_s: float = ORDER_S) -> R:
        """Send an order and return its reply. Raises CrewError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, self._member.ask, order, expected, patience_s)
        except CrewError as error:
            raise CrewError(f"{type(order).__name__}: {error}") from error

    async def resources(self) -> ResourceUse:
        """Count what its process holds. Raises CrewError."""
        counted = await self.ask(CountResources(), ResourceCount)
        files, home = open_descriptors(self._process.pid), Path(f"/proc/{self._process.pid}")
        mapped = (home / "maps").read_text().count(str(self._images))
        return ResourceUse(files=files, mapped=mapped, regions=tuple(counted.regions), tasks=counted.tasks)

    async def leaks(self) -> str:
        """Describe what it holds beyond `fresh` after some time to release it, or return ""."""
        assert self.fresh is not None
        deadline_s = time.monotonic() + SETTLES_S
        while True:
            more = (await self.resources()).excess_over(self.fresh)
            if not more or time.monotonic() > deadline_s:
                return more
            await asyncio.sleep(_POLL_S)

    def stop(self) -> None:
        """Suspend it; its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """Kill it, and wait for its end. Idempotent."""
        self._process.kill()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._process.wait)
        self._member.close()


class Fleet:
    """`nodes` nodes by rank, at addresses of their own on the loopback device."""

    def __init__(self, nodes: int, rate_bytes_s: float, images: Path, log: IO[bytes]) -> None:
        self._size = nodes
        self._rate_bytes_s = rate_bytes_s
        self._images = images
        self._log = log
        self._numbers = count()
        self._processes = Processes()
        self._pool = ThreadPoolExecutor(_THREADS_PER_NODE * (nodes + 1))
        self._listener = CrewListener(Path(log.name).with_suffix(".socket"), PROTOCOL, nodes + 1)
        self._all: list[FaultyProcess] = []
        self._spare: FaultyProcess | None = None
        self.nodes: list[FaultyProcess] = []

    def __repr__(self) -> str:
        return f"Fleet({len(self.nodes)} of {self._size} nodes)"

    async def __aenter__(self) -> Self:
        """Start all processes. Raises CrewError."""
        try:
            *started, self._spare = await self._start(self._size + 1)
            for rank, node in enumerate(started):
                await node.serve(_address(rank), self._rate_bytes_s)
            self.nodes = started
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill all processes. Idempotent."""
        for process in self._all:
            await process.kill()
        self._all.clear()
        self._processes.close()
        self._listener.close()
        self._pool.shutdown()

    async def ensure_spare(self) -> None:
        """Start the process in reserve, if there is none. Raises CrewError."""
        if self._spare is None:
            (self._spare,) = await self._start(1)

    async def replace(self, rank: int, *, same_place: bool = False) -> FaultyProcess:
        """Replace a killed node by the one in reserve, at the same address if requested. Raises CrewError."""
        killed, spare = self.nodes[rank], self._spare
        assert spare is not None
        self._spare = None
        self._all.remove(killed)
        self.nodes[rank] = spare
        await spare.serve(killed.url if same_place else _address(rank), self._rate_bytes_s)
        return spare

    async def _start(self, number: int) -> list[FaultyProcess]:
        """Start processes, and wait until all have connected."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes: dict[int, Process] = {}
        for rank in (next(self._numbers) for _ in range(number)):
            command = module("benchmarks.cast_faults.node", self._listener.path, rank)
            processes[rank] = self._processes.start(command, stderr=self._log, env=environment)
        return [await self._accept(processes) for _ in range(number)]

    async def _accept(self, processes: Mapping[int, Process]) -> FaultyProcess:
        deadline_s, started = time.monotonic() + ORDER_S, list(processes.values())
        loop = asyncio.get_running_loop()
        member = await loop.run_in_executor(self._pool, self._listener.accept, started, deadline_s)
        if member is None:
            raise CrewError(f"a node did not connect within {ORDER_S:g} s")
        node = FaultyProcess(processes[member.hello.rank], member, self._images, self._pool)
        self._all.append(node)
        return node


def _address(rank: int) -> str:
    """Return an address of its own: no other node's connection then takes a returning node's port."""
    return f"tcp://127.77.0.{rank + 1}:0"
